#include "ckpt/rename_arguments.h"

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace tessera::tools {
namespace {

// Returns a pattern that matches this text alone.
std::string whole_name(const std::string& text) {
  std::string pattern = "^";
  for (const char c : text) {
    if (std::string_view(R"(^$\.*+?()[]{}|/)").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern + "$";
}

// `$` has a meaning in a replacement.
std::string literal(const std::string& text) {
  std::string replacement;
  for (const char c : text) replacement += c == '$' ? "$$" : std::string(1, c);
  return replacement;
}

RenameRules rules_in(const nlohmann::ordered_json& json) {
  RenameRules rules;
  if (json.is_object()) {
    for (const auto& item : json.items())
      rules.push_back({whole_name(item.key()), literal(item.value().get<std::string>())});
    return rules;
  }
  for (const auto& rule : json) {
    if (!rule.is_array() || rule.size() != 2)
      throw std::invalid_argument("a rule must be [\"PATTERN\", \"REPLACEMENT\"]");
    rules.push_back({rule[0].get<std::string>(), rule[1].get<std::string>()});
  }
  return rules;
}

RenameRules read_rules(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument(fmt::format("--rename-file: could not open '{}'", path));
  try {
    return rules_in(nlohmann::ordered_json::parse(file));
  } catch (const std::exception& error) {
    throw std::invalid_argument(
        fmt::format("--rename-file: '{}' must be a JSON list of [\"PATTERN\", \"REPLACEMENT\"], or "
                    "an object of "
                    "names: {}",
                    path, error.what()));
  }
}

}  // namespace

RenameRules rename_rules_of(const std::string& file, const std::vector<std::string>& arguments) {
  RenameRules rules = file.empty() ? RenameRules() : read_rules(file);
  for (const std::string& argument : arguments) {
    const size_t cut = argument.rfind('=');
    if (cut == std::string::npos)
      throw std::invalid_argument(
          fmt::format("--rename must be PATTERN=REPLACEMENT; got '{}'", argument));
    rules.push_back({argument.substr(0, cut), argument.substr(cut + 1)});
  }
  return rules;
}

}  // namespace tessera::tools
