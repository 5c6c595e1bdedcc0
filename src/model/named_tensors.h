#pragma once

#include <tessera/fully_shard.h>

#include <vector>

namespace tessera {

/// What `named_parameters()` and `named_buffers()` of a `torch::nn::Module` list.
template <class Items>
std::vector<NamedTensor> named_tensors(const Items& items) {
  std::vector<NamedTensor> result;
  for (const auto& item : items) result.push_back({item.key(), item.value()});
  return result;
}

}  // namespace tessera
