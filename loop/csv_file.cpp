#include "loop/csv_file.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

namespace tessera {
namespace {

constexpr const char* kFirstColumns = "step,wall_time";

std::string quoted(const std::string& name) {
  if (name.find_first_of(",\"") == std::string::npos) return name;
  std::string result = "\"";
  for (const char c : name) result += c == '"' ? std::string("\"\"") : std::string(1, c);
  return result + "\"";
}

// Returns the names in the first line, as `quoted()` wrote them.
std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> fields(1);
  bool is_quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"') {
      const bool is_doubled = is_quoted && i + 1 < line.size() && line[i + 1] == '"';
      is_doubled ? void(fields.back() += line[++i]) : void(is_quoted = !is_quoted);
    } else if (line[i] == ',' && !is_quoted) {
      fields.emplace_back();
    } else {
      fields.back() += line[i];
    }
  }
  return fields;
}

std::string header(const std::vector<std::string>& names) {
  std::string line = kFirstColumns;
  for (const std::string& name : names) line += "," + quoted(name);
  return line;
}

bool is_before(const std::string& row, std::optional<int64_t> first_step) {
  int64_t step = 0;
  const auto [end, error] = std::from_chars(row.data(), row.data() + row.size(), step);
  return error == std::errc() && (!first_step || step < *first_step);
}

}  // namespace

CsvFile::CsvFile(std::filesystem::path path, std::optional<int64_t> first_step)
    : path_(std::move(path)) {
  std::ifstream old(path_);
  std::string line;
  if (!std::getline(old, line)) {
    rewrite({}, std::nullopt);
    return;
  }
  TORCH_CHECK_VALUE(line.starts_with(kFirstColumns), "[MetricsLog] '", path_.string(),
                    "' must be a table that a MetricsLog wrote, whose first line begins with ",
                    kFirstColumns, "; got '", line.substr(0, 40), "'");
  names_ = split(line);
  names_.erase(names_.begin(), names_.begin() + 2);
  rewrite(names_, first_step);
}

// Copies the rows before `first_step` into a table with the columns `names`, of which the present
// ones are the first.
void CsvFile::rewrite(const std::vector<std::string>& names, std::optional<int64_t> first_step) {
  const std::filesystem::path draft = path_.string() + ".tmp";
  {
    std::ofstream out(draft);
    out << header(names) << '\n';
    std::ifstream old(path_);
    std::string row;
    std::getline(old, row);
    while (std::getline(old, row))
      if (is_before(row, first_step))
        out << row << std::string(names.size() - names_.size(), ',') << '\n';
    out.flush();
    TORCH_CHECK(out, "[MetricsLog] could not write '", draft.string(), "'");
  }
  file_.close();
  std::filesystem::rename(draft, path_);
  file_.open(path_, std::ios::app);
  names_ = names;
}

void CsvFile::write(double wall_time, int64_t step, const std::map<std::string, double>& values) {
  std::vector<std::string> names = names_;
  for (const auto& [name, value] : values)
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  if (names.size() > names_.size()) rewrite(names, std::nullopt);
  std::string row = fmt::format("{},{:.3f}", step, wall_time);
  for (const std::string& name : names_) {
    row += ',';
    if (const auto it = values.find(name); it != values.end()) row += fmt::format("{}", it->second);
  }
  append(row);
}

void CsvFile::append(const std::string& line) {
  file_ << line << '\n' << std::flush;
  TORCH_CHECK(file_, "[MetricsLog] could not write '", path_.string(), "'");
}

}  // namespace tessera
