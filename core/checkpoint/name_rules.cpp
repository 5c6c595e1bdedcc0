#include "checkpoint/name_rules.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "base/files/untrusted.h"

namespace tessera {
namespace {

std::regex compiled(const std::string& pattern, const char* option) {
  try {
    return std::regex(pattern);
  } catch (const std::regex_error& error) {
    TORCH_CHECK_VALUE(false, "[checkpoint] ", option, " must be regular expressions; '",
                      shortened(pattern), "' is none: ", error.what());
  }
}

// A level of recursion of std::regex for each character, and many for some expressions.
constexpr size_t kLongestMatched = 1000;

// Returns a name, from an untrusted file, that the stack has room to match.
const std::string& matchable(const std::string& name) {
  TORCH_CHECK_VALUE(
      name.size() <= kLongestMatched,
      "[checkpoint] names that are matched with regular expressions must have at most ",
      kLongestMatched, " characters; '", shortened(name), "' has ", name.size());
  return name;
}

// Returns the number of characters to insert, remove or replace.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

std::vector<std::string> renamed(const std::vector<std::string>& names,
                                 const std::function<std::string(const std::string&)>& rename) {
  std::vector<std::string> result;
  for (const std::string& name : names) {
    std::string other = rename(name);
    if (!other.empty() && std::ranges::find(result, other) == result.end())
      result.push_back(std::move(other));
  }
  return result;
}

// More names than a message lists, and than a model has tensors that a person could have mistyped.
constexpr size_t kMostCompared = 20'000, kMostComparedBytes = 300;

}  // namespace

NameRules::NameRules(const RenameRules& rules, const char* option) {
  for (const auto& [pattern, replacement, names] : rules) {
    TORCH_CHECK_VALUE(names.empty() || (pattern.empty() && replacement.empty()),
                      "[checkpoint] a rule of ", option,
                      " must have a pattern or names, not both; got the pattern '",
                      shortened(pattern), "' and ", names.size(), " names");
    rules_.push_back({compiled(pattern, option), replacement, names});
  }
}

std::string NameRules::Rule::apply(const std::string& name) const {
  if (names.empty()) return std::regex_replace(matchable(name), pattern, replacement);
  const auto it = names.find(name);
  return it == names.end() ? name : it->second;
}

std::string NameRules::apply(std::string name) const {
  for (const Rule& rule : rules_) name = rule.apply(name);
  return name;
}

void rename_tensors(CheckpointIndex& index, const std::string& path,
                    const std::function<std::string(const std::string&)>& rename) {
  std::erase_if(index.tensors, [&](TensorRecord& record) {
    record.names = renamed(record.names, rename);
    return record.names.empty();
  });
  std::unordered_set<std::string> seen;
  for (const TensorRecord& record : index.tensors) {
    for (size_t i = 0; i < record.names.size(); ++i)
      TORCH_CHECK_VALUE(seen.insert(record.id(i)).second, "[checkpoint] two tensors of '", path,
                        "' get the name '", shortened(record.names[i]), "'; names must differ");
  }
  if (!index.optimizer) return;
  for (ParamGroupRecord& group : index.optimizer->param_groups)
    group.params = renamed(group.params, rename);
  decltype(index.optimizer->counts) counts;
  for (auto& [name, values] : index.optimizer->counts) {
    const std::string other = rename(name);
    if (!other.empty()) counts[other] = std::move(values);
  }
  index.optimizer->counts = std::move(counts);
}

void transpose_tensors(CheckpointIndex& index, const std::vector<std::string>& patterns) {
  std::vector<std::regex> compiled_patterns;
  for (const std::string& pattern : patterns)
    compiled_patterns.push_back(compiled(pattern, "options.transpose"));
  for (TensorRecord& record : index.tensors) {
    const bool is_named = std::ranges::any_of(record.names, [&](const std::string& name) {
      return std::ranges::any_of(compiled_patterns, [&](const std::regex& pattern) {
        return std::regex_match(matchable(name), pattern);
      });
    });
    if (!is_named) continue;
    TORCH_CHECK_VALUE(record.shape.size() == 2, "[checkpoint] options.transpose names '",
                      shortened(record.names.front()),
                      "', which must have two dims; it has the shape ",
                      c10::IntArrayRef(record.shape));
    std::swap(record.shape[0], record.shape[1]);
    std::swap(record.strides[0], record.strides[1]);
  }
}

std::string most_similar(const std::string& name, const std::vector<std::string>& names) {
  std::string found;
  if (name.size() > kMostComparedBytes) return found;
  size_t least = (name.size() + 1) / 2 + 1;  // less than half of the name differs
  for (size_t i = 0; i < std::min(names.size(), kMostCompared); ++i) {
    if (names[i].size() > kMostComparedBytes) continue;
    const size_t distance = edit_distance(name, names[i]);
    if (distance < least) least = distance, found = names[i];
  }
  return found;
}

}  // namespace tessera
