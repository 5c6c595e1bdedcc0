#pragma once

#include <cstddef>
#include <cstdint>

#include "group/local_sum.h"

namespace tessera {

/// A part of a reduction: elements [begin, end) of the pieces of all ranks, reduced in rank order.
struct ArenaReduction {
  int64_t begin = 0, end = 0;
  std::byte* out = nullptr;  ///< receives the range; its first element
  LocalReduction reduction;
};

}  // namespace tessera
