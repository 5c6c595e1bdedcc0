#include "grad/given_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera {
namespace {

// Returns the gradient of a parameter; undefined if it has none. It is laid out like the parameter,
// so that its elements can be changed in place. Of tensors that share memory, the first holds the
// sum.
at::Tensor gradient_of(const ParamSlot& slot) {
  const at::Tensor first = slot.tensor();
  if (!first.defined()) return {};
  at::NoGradGuard no_grad;
  at::Tensor& gradient = first.mutable_grad();
  for (size_t i = 1; i < slot.handles.size(); ++i) {
    at::Tensor& other = slot.tensor(i).mutable_grad();
    if (!other.defined()) continue;
    gradient = gradient.defined() ? gradient.add_(other) : other;
    other.reset();
  }
  if (gradient.defined() && gradient.strides() != at::IntArrayRef(slot.strides))
    gradient = flat_in_order(gradient, slot.strides).as_strided(slot.sizes, slot.strides);
  return gradient;
}

void clear_handles(const ParamSlot& slot) {
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor tensor = slot.tensor(i);
    if (tensor.defined()) tensor.mutable_grad().reset();
  }
}

}  // namespace

void GivenGradients::clear(size_t slot) { clear_handles(unit().layout().slots[slot]); }

void GivenGradients::clear_all() {
  for (const ParamSlot& slot : unit().layout().slots) clear_handles(slot);
}

void GivenGradients::zero_all() {
  at::NoGradGuard no_grad;
  for (const ParamSlot& slot : unit().layout().slots) {
    for (size_t i = 0; i < slot.handles.size(); ++i) {
      const at::Tensor tensor = slot.tensor(i);
      if (tensor.defined() && tensor.grad().defined()) tensor.mutable_grad().zero_();
    }
  }
}

bool GivenGradients::is_live(size_t slot) const {
  return gradient_of(unit().layout().slots[slot]).defined();
}

at::Tensor GivenGradients::reduced(int64_t begin, int64_t end) const {
  const auto& slots = unit().layout().slots;
  const auto slot = std::find_if(slots.begin(), slots.end(), [&](const ParamSlot& candidate) {
    return candidate.offset <= begin && end <= candidate.offset + candidate.numel;
  });
  TORCH_INTERNAL_ASSERT(slot != slots.end());
  const at::Tensor gradient = gradient_of(*slot);
  return at::as_strided(gradient, {end - begin}, {1},
                        gradient.storage_offset() + begin - slot->offset);
}

}  // namespace tessera
