#pragma once

#include <tessera/engine/plan_fields.h>

#include <map>
#include <string>

namespace tessera::tools {

/// The levels of sharding by their names in arguments.
inline const std::map<std::string, ShardLevel> kLevels = [] {
  std::map<std::string, ShardLevel> levels;
  for (const auto& level : kPlanChoices<ShardLevel>) levels[level.name] = level.value;
  return levels;
}();

}  // namespace tessera::tools
