#pragma once

#include <cstdint>

namespace tessera {

/// Returns the hash of a sequence of numbers: `hash`, that of the others, with `value` after them.
/// Equal in all processes.
inline uint64_t mixed_hash(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 32);
}

}  // namespace tessera
