#include "launcher/environment.h"

#include <unistd.h>

#include <map>
#include <string_view>

#include "launcher/heap_settings.h"

namespace tessera::tools {
namespace {

using Variables = std::map<std::string, std::string>;

Variables inherited_variables() {
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    // These describe the store of an outer launcher (torchrun); our ranks have another.
    if (text.starts_with("TORCHELASTIC_")) continue;
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

/// An empty value hides that of an outer launcher.
void set_or_hide(Variables& variables, const std::string& name, const std::string& value) {
  if (value.empty()) {
    variables.erase(name);
  } else {
    variables[name] = value;
  }
}

}  // namespace

std::vector<std::string> rank_environment(const LaunchOptions& options,
                                          const RankAssignment& assignment) {
  Variables variables = inherited_variables();
  const int local_ranks = assignment.local_ranks > 0 ? assignment.local_ranks : assignment.ranks;
  variables["RANK"] = std::to_string(assignment.rank);
  variables["WORLD_SIZE"] = std::to_string(assignment.ranks);
  variables["LOCAL_RANK"] = std::to_string(assignment.rank - assignment.first_rank);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(local_ranks);
  variables["MASTER_ADDR"] = assignment.master;
  variables["MASTER_PORT"] = std::to_string(assignment.port);
  variables["TESSERA_RUN"] = "1";
  variables["TESSERA_RESTART"] = std::to_string(assignment.attempt);
  set_or_hide(variables, "TESSERA_JOB", assignment.job);
  set_or_hide(variables, "TESSERA_FLIGHT_DIR", assignment.flight_folder);
  if (!assignment.secret.empty()) variables.emplace("TESSERA_SECRET", assignment.secret);
  variables.emplace("OMP_NUM_THREADS", std::to_string(assignment.threads));  // unless it is set
  if (!options.default_malloc) {
    for (const auto& [name, value] : heap_settings()) variables.emplace(name, value);
  }
  for (const auto& [name, value] : options.environment) variables[name] = value;

  std::vector<std::string> result;
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

}  // namespace tessera::tools
