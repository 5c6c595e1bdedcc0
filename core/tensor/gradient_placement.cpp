#include "tensor/gradient_placement.h"

#include <ATen/core/grad_mode.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "base/dispatch/each_tensor.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

// A type of its own, so that it can be found among the hooks of a tensor.
struct PlaceGradient {
  // The leaf owns its hooks, so they must not own it. Its placements may change later.
  c10::weak_intrusive_ptr<c10::TensorImpl> leaf;

  at::TensorBase operator()(const at::TensorBase& gradient) const {
    const auto alive = leaf.lock();
    if (!alive || !gradient.defined())
      return gradient;  // a derivative that is zero may be undefined
    const DistMeta* const meta = find_dist_meta(at::Tensor(alive));
    if (!meta) return gradient;  // it was made an ordinary tensor again
    const DeviceMesh& mesh = meta->spec->mesh;
    const bool has_own = meta->parameter && meta->parameter->gradients;
    const at::Tensor given(gradient);
    // A gradient that was computed from ordinary tensors alone is the same on all ranks.
    return redistribute(
        is_dist(given) ? given : distribute(given, mesh, {}), mesh,
        has_own ? meta->parameter->gradients->placements : without_partial(meta->spec->placements));
  }
};

struct ReduceGradient {
  DistSpecPtr spec;  // to whose placements terms are reduced

  at::TensorBase operator()(const at::TensorBase& gradient) const {
    const at::Tensor given(gradient);
    const DistMeta* const meta = find_dist_meta(given);
    if (!meta || !meta->spec->mesh.is_same(spec->mesh)) return gradient;
    const Placements& now = meta->spec->placements;
    if (std::ranges::none_of(now, is_partial)) return gradient;
    return redistribute(given, spec->mesh, reduced(now));
  }

  Placements reduced(const Placements& now) const {
    Placements own = without_partial(spec->placements), result = now;
    for (size_t i = 0; i < now.size(); ++i) {
      if (is_partial(now[i])) result[i] = own[i];
    }
    // A dim of the tensor is then cut by the tensor's mesh dims, or by the gradient's, but by no
    // mix of them.
    return result == own ? result : without_partial(now);
  }
};

// The view's base, if the base's gradient is as large as that of the view, or smaller.
at::Tensor whole_of(const at::Tensor& tensor) {
  if (!tensor.is_view()) return tensor;
  const at::Tensor base(tensor._base());
  return base.requires_grad() && base.numel() <= tensor.numel() ? base : tensor;
}

template <class Hook>
bool has_hook(const at::Tensor& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta && meta->cpp_hooks_list_ &&
         std::ranges::any_of(*meta->cpp_hooks_list_, [](const auto& hook) {
           return hook.template target<Hook>() != nullptr;
         });
}

}  // namespace

void place_gradients(const at::Tensor& leaf) {
  if (has_hook<PlaceGradient>(leaf)) return;
  static_cast<const at::TensorBase&>(leaf).register_hook(
      PlaceGradient{c10::weak_intrusive_ptr<c10::TensorImpl>(leaf.getIntrusivePtr())});
}

void place_gradients_of(at::ArrayRef<c10::IValue> arguments) {
  if (!at::GradMode::is_enabled()) return;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [](const at::Tensor& tensor) {
      if (tensor.requires_grad() && tensor.is_leaf() && find_dist_meta(tensor))
        place_gradients(tensor);
    });
  }
}

void reduce_gradients(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return;
  const at::Tensor hooked = whole_of(tensor);
  const DistMeta* const meta = find_dist_meta(hooked);
  if (!meta || hooked.is_leaf() || has_hook<ReduceGradient>(hooked)) return;
  static_cast<const at::TensorBase&>(hooked).register_hook(ReduceGradient{meta->spec});
}

void reduce_gradients_to(const at::Tensor& tensor, const DistSpecPtr& source) {
  if (!tensor.requires_grad() || tensor.is_leaf() || has_hook<ReduceGradient>(tensor)) return;
  static_cast<const at::TensorBase&>(tensor).register_hook(ReduceGradient{source});
}

}  // namespace tessera
