#include <ATen/ops/max_pool1d_with_indices.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "mesh/decompositions.h"

namespace tessera {
namespace {

// If no gradient is required, LibTorch's own form reads the memory of the tensor.
at::Tensor max_pool1d(const at::Tensor& self, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(
      at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

}  // namespace

void register_composites() {
  static auto* const libraries = new std::vector<torch::Library>();
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse3, c10::DispatchKey::PrivateUse3}) {
    libraries->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    libraries->back().impl("max_pool1d", max_pool1d);
  }
}

}  // namespace tessera
