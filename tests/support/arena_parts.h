#pragma once

#include <tessera/world.h>

#include "arena/arena_process_group.h"

namespace tessera::testing {

/// Returns how often this rank did another rank's part, in a world over the arena.
inline int64_t parts_done_for_others(const World& world) {
  return dynamic_cast<ArenaProcessGroup&>(world.process_group()->transport()).arena()->parts_done_for_others();
}

}  // namespace tessera::testing
