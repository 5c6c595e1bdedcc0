#include "interop/command/rename_arguments.h"

#include <fmt/format.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace tessera::tools {
namespace {

RenameRules rules_in(const nlohmann::json& json) {
  RenameRules rules;
  if (json.is_object()) {
    if (!json.empty()) rules.push_back({.names = json.get<std::map<std::string, std::string>>()});
    return rules;
  }
  for (const auto& rule : json) {
    if (!rule.is_array() || rule.size() != 2)
      throw std::invalid_argument("a rule must be [\"PATTERN\", \"REPLACEMENT\"]");
    rules.push_back({rule[0].get<std::string>(), rule[1].get<std::string>()});
  }
  return rules;
}

// Returns what `parsed` makes of the JSON in a file, which must be `form`.
template <class Parsed>
auto read_json(const std::string& option, const std::string& path, const std::string& form,
               Parsed&& parsed) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument(fmt::format("{}: could not open '{}'", option, path));
  try {
    return parsed(nlohmann::json::parse(file));
  } catch (const std::exception& error) {
    throw std::invalid_argument(
        fmt::format("{}: '{}' must be {}: {}", option, path, form, error.what()));
  }
}

}  // namespace

RenameRules rename_rules_of(const std::string& file, const std::vector<std::string>& arguments) {
  RenameRules rules;
  if (!file.empty()) {
    rules =
        read_json("--rename-file", file,
                  R"(a JSON list of ["PATTERN", "REPLACEMENT"], or an object of names)", rules_in);
  }
  for (const std::string& argument : arguments) {
    const size_t cut = argument.rfind('=');
    if (cut == std::string::npos)
      throw std::invalid_argument(
          fmt::format("--rename must be PATTERN=REPLACEMENT; got '{}'", argument));
    rules.push_back({argument.substr(0, cut), argument.substr(cut + 1)});
  }
  return rules;
}

std::vector<std::string> names_in(const std::string& option, const std::string& file) {
  return read_json(option, file, "a JSON list of names",
                   [](const nlohmann::json& json) { return json.get<std::vector<std::string>>(); });
}

}  // namespace tessera::tools
