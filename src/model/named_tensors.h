#pragma once

#include <tessera/fully_shard.h>

#include <vector>

namespace tessera {

/// Returns the items of `named_parameters()` or `named_buffers()` of a `torch::nn::Module`.
template <class Items>
std::vector<NamedTensor> named_tensors(const Items& items) {
  std::vector<NamedTensor> result;
  for (const auto& item : items) result.push_back({item.key(), item.value()});
  return result;
}

}  // namespace tessera
