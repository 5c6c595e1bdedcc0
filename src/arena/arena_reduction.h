#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "group/local_sum.h"

namespace tessera {

/// A part of a reduction: elements [begin, end) of what all ranks show, in rank order. Is copied
/// into shared memory where another rank may do it.
struct ArenaReduction {
  int64_t begin = 0, end = 0;
  std::byte* out = nullptr;  ///< first element of the range, where its rank has it
  LocalReduction reduction;
};

static_assert(std::is_trivially_copyable_v<ArenaReduction>);

}  // namespace tessera
