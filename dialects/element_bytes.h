#pragma once

#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace tessera {

/// Returns the bytes of `elements` elements of the widest dtype among the module's parameters; at
/// most the largest number. For dialects that count elements where plans count bytes.
inline int64_t element_bytes(const torch::nn::Module& module, int64_t elements) {
  int64_t item = 1;
  for (const at::Tensor& param : module.parameters())
    item = std::max(item, static_cast<int64_t>(param.element_size()));
  return std::min(elements, std::numeric_limits<int64_t>::max() / item) * item;
}

}  // namespace tessera
