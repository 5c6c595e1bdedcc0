#include <ATen/core/Tensor.h>
#include <ATen/ops/masked_fill.h>

#include <algorithm>
#include <vector>

#include "tensor/decompositions.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

// One number put under a mask, as by `x.index_put_({mask}, 0)`: an elementwise operator. The
// elements that a mask selects can't be placed without knowing its values, so other calls with a
// mask have no decomposition.

// The mask, with ones for the dims of `self` that it does not have; undefined for other calls.
at::Tensor mask_of_number(const DecomposedCall& call) {
  const at::Tensor self = call.tensor("self"), values = call.tensor("values");
  const auto indices = call.argument("indices").toListRef();
  if (call.argument("accumulate").toBool() || values.numel() != 1 || indices.size() != 1 ||
      !indices[0].isTensor())
    return {};
  const at::Tensor mask = indices[0].toTensor();
  if (!mask.defined() || mask.scalar_type() != at::kBool || mask.dim() > self.dim() ||
      !std::equal(mask.sizes().begin(), mask.sizes().end(), self.sizes().begin()))
    return {};
  std::vector<int64_t> sizes = mask.sizes().vec();
  sizes.resize(self.dim(), 1);
  return mask.view(sizes);
}

template <bool kInPlace>
bool put_number(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor mask = mask_of_number(call);
  if (!mask.defined()) return false;
  at::Tensor self = call.tensor("self");
  const at::Tensor value = call.tensor("values").view(at::IntArrayRef());
  return finish(op, stack,
                {kInPlace ? self.masked_fill_(mask, value) : at::masked_fill(self, mask, value)});
}

constexpr DecompositionEntry kMasks[] = {
    {"index_put", put_number<false>},
    {"index_put_", put_number<true>},
};

}  // namespace

std::span<const DecompositionEntry> mask_decompositions() { return kMasks; }

}  // namespace tessera
