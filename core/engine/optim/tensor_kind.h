#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera {

/// The properties in which all tensors of a list must agree that LibTorch's operators on lists
/// take.
using TensorKind = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>;

inline TensorKind kind_of(const at::Tensor& tensor) {
  return {tensor.device().type(), tensor.device().index(), tensor.scalar_type()};
}

}  // namespace tessera
