#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/collective.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// Returns the size in bytes of an element that a reduce-scatter sends.
inline int64_t item_size(const ReduceScatter& call) {
  return static_cast<int64_t>(c10::elementSize(call.dtype()));
}

/// Returns bounds that split `numel` elements as evenly as possible over `size` ranks.
std::vector<int64_t> even_bounds(int64_t numel, int size);

}  // namespace tessera
