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

RenameRules rules_in_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument(fmt::format("--rename-file: could not open '{}'", path));
  try {
    return rules_in(nlohmann::json::parse(file));
  } catch (const std::exception& error) {
    throw std::invalid_argument(fmt::format(
        R"(--rename-file: '{}' must be a JSON list of ["PATTERN", "REPLACEMENT"], or an object of names: {})",
        path, error.what()));
  }
}

}  // namespace

RenameRules rename_rules_of(const std::string& file, const std::vector<std::string>& arguments) {
  RenameRules rules = file.empty() ? RenameRules() : rules_in_file(file);
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
