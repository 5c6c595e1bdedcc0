#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/strides.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// Returns the strides in which a copy of the tensor without gaps lies: its own if it fills its
/// memory without gaps, in any order of dims (as channels_last does), or else row by row.
inline std::vector<int64_t> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  const auto strides = c10::contiguous_strides(tensor.sizes());
  return {strides.begin(), strides.end()};
}

}  // namespace tessera
