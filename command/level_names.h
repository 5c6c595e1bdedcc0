#pragma once

#include <tessera/engine/shard_plan.h>

#include <map>
#include <string>

namespace tessera::tools {

/// The levels of sharding by their names in arguments, from nothing to everything.
inline const std::map<std::string, ShardLevel> kLevels = {{"none", ShardLevel::kNone},
                                                          {"os", ShardLevel::kOptimizerState},
                                                          {"os_g", ShardLevel::kGradients},
                                                          {"p_g_os", ShardLevel::kParameters}};

}  // namespace tessera::tools
