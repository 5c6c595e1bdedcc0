#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace tessera {

/// Tensors up to this size are all-reduced in one round: each rank sends its tensor to all others.
inline constexpr size_t kMaxOneRoundBytes = 4096;

inline bool is_reduced_whole(const at::Tensor& tensor) {
  return tensor.nbytes() <= kMaxOneRoundBytes;
}

/// Returns the payload in bytes that each of `ranks` ranks sends to all-reduce `nbytes` by direct
/// exchange. For larger tensors each rank sends the other ranks' parts, then the sums of its own.
inline int64_t all_reduce_bytes(int64_t nbytes, int64_t ranks) {
  if (nbytes <= static_cast<int64_t>(kMaxOneRoundBytes)) return (ranks - 1) * nbytes;
  const int64_t times = 2 * (ranks - 1);  // multiplying `nbytes` by it could overflow
  return nbytes / ranks * times + nbytes % ranks * times / ranks;
}

}  // namespace tessera
