#pragma once

#include <cstddef>
#include <cstdint>

#include "group/local_sum.h"

namespace tessera {

/// A part of a reduction: elements [begin, end) of what all ranks show, in rank order.
struct ArenaReduction {
  int64_t begin = 0, end = 0;
  std::byte* out = nullptr;  ///< first element of the range
  LocalReduction reduction;
};

}  // namespace tessera
