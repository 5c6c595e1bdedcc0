#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include "base/dispatch/math_bits.h"
#include "tensor/dist_dispatch.h"
#include "tensor/dist_meta.h"
#include "tensor/gradient_placement.h"
#include "tensor/identity.h"
#include "tensor/placed.h"
#include "tensor/redistribute.h"
#include "tensor/view_source.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr const char* kSpec = "spec";
constexpr const char* kSizes = "sizes";

// A DistTensor's spec in a form that autograd can keep.
struct SpecHolder : torch::CustomClassHolder {
  explicit SpecHolder(DistSpecPtr held) : spec(std::move(held)) {}
  const DistSpecPtr spec;
};

void keep(AutogradContext* context, const DistSpecPtr& spec, at::IntArrayRef sizes) {
  context->saved_data[kSpec] = c10::IValue::make_capsule(c10::make_intrusive<SpecHolder>(spec));
  context->saved_data[kSizes] = sizes.vec();
}

DistSpecPtr kept_spec(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<SpecHolder>(context->saved_data[kSpec].toCapsule())
      ->spec;
}

// A gradient, placed for the tensor that `context` has kept: every rank's term of a pending
// reduction has the gradient of the result. A gradient that was computed from ordinary tensors
// alone is the same on all ranks.
at::Tensor placed_gradient(AutogradContext* context, const at::Tensor& gradient) {
  const DistSpecPtr spec = kept_spec(context);
  return redistribute(is_dist(gradient) ? gradient : distribute(gradient, spec->mesh, {}),
                      spec->mesh, without_partial(spec->placements));
}

// A tensor that is replicated keeps its memory, and with it its strides; others get parts of their
// own, dense ones. All ranks agree on the strides: those that are not in the mesh, too.
at::Tensor with_part(const at::Tensor& tensor, const DistSpecPtr& spec) {
  const bool is_kept = spec->placements == replicated(spec->mesh);
  const bool is_member = spec->mesh.is_member();
  const at::Tensor whole = with_plain_memory(tensor);
  const at::Tensor part = is_member ? placed(whole, *spec, "distributed tensor")
                                    : at::empty({0}, whole.options().requires_grad(false));
  if (is_kept) return make_dist(part.detach(), spec, whole.sizes(), whole.strides());
  const bool is_shared = is_member && part.is_alias_of(whole);
  return make_dist_like(is_shared ? part.clone() : part.detach(), spec, whole);
}

struct Distribute : Function<Distribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const DistSpecPtr& spec) {
    return with_part(tensor, spec);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {is_dist(gradients[0]) ? full_tensor(gradients[0]) : gradients[0], at::Tensor()};
  }
};

struct FromLocal : Function<FromLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local,
                            const DistSpecPtr& spec, const std::vector<int64_t>& sizes) {
    keep(context, spec, sizes);
    // Autograd may add to a gradient in place: a repeated element would get all sums.
    const bool repeats = at::has_internal_overlap(local) == at::MemOverlap::Yes;
    const at::Tensor part = repeats ? local.clone() : local.detach();
    // Ranks know each other's strides and marks only if all parts are contiguous and have none.
    return make_dist(part.contiguous().resolve_conj().resolve_neg(), spec, sizes);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {to_local(placed_gradient(context, gradients[0])), at::Tensor(), at::Tensor()};
  }
};

struct ToLocal : Function<ToLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const DistSpecPtr& of_gradient) {
    const DistMeta& meta = dist_meta("to_local", tensor);
    keep(context, of_gradient, tensor.sizes());
    return local_part(meta).detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const DistSpecPtr spec = kept_spec(context);
    return {from_local(gradients[0], spec->mesh, spec->placements,
                       context->saved_data[kSizes].toIntVector()),
            at::Tensor()};
  }
};

// Ranks distinguish parameters that are otherwise alike by this name.
std::string subject_of(const DistMeta& meta) {
  const bool has_name = meta.parameter && !meta.parameter->name.empty();
  return has_name ? "redistributed tensor (parameter '" + meta.parameter->name + "')"
                  : "redistributed tensor";
}

struct Redistribute : Function<Redistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const DistSpecPtr& to) {
    const DistMeta& meta = dist_meta("redistribute", tensor);
    keep(context, meta.spec, tensor.sizes());
    const at::Tensor& own = local_part(meta);
    const std::string name = subject_of(meta);
    const Subject subject(name, meta.identity);
    const bool stays = meta.spec->mesh == to->mesh;
    const at::Tensor local = stays
                                 ? convert(own, *meta.spec, to->placements, tensor.sizes(), subject)
                                 : transfer(own, *meta.spec, *to, tensor.sizes(), subject);
    const IdentityScope scope(stays ? meta.identity : 0);
    // Clone a slice: it would change with the source, and other placements would not.
    return make_dist_like(local.is_alias_of(own) ? local.clone() : with_plain_memory(local), to,
                          tensor);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {placed_gradient(context, gradients[0]), at::Tensor()};
  }
};

std::vector<int64_t> global_sizes(const at::Tensor& local, const DeviceMesh& mesh,
                                  const Placements& placements) {
  std::vector<int64_t> sizes = local.sizes().vec();
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    if (const auto* const shard = std::get_if<Shard>(&placements[i]))
      sizes[shard->dim] *= mesh.size(i);
  }
  return sizes;
}

void check_part(const at::Tensor& local, const DistSpec& spec, at::IntArrayRef sizes) {
  if (!spec.mesh.is_member()) return;
  const auto expected = local_sizes_of(spec, sizes);
  TORCH_CHECK_VALUE(local.sizes() == at::IntArrayRef(expected),
                    "[from_local] `local` must be this rank's part of a tensor of sizes ", sizes,
                    " with placements ", to_string(spec.placements), "; expected sizes ",
                    at::IntArrayRef(expected), ", got ", local.sizes());
}

}  // namespace

bool is_dist(const at::Tensor& tensor) { return find_dist_meta(tensor) != nullptr; }

at::Tensor distribute(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements) {
  TORCH_CHECK_VALUE(tensor.defined() && !is_dist(tensor),
                    "[distribute] `tensor` must be an ordinary tensor; got ",
                    tensor.defined() ? "a DistTensor; redistribute() changes its placements"
                                     : "an undefined one");
  register_dist_operators();
  const DistSpecPtr spec = checked_spec("distribute", mesh, std::move(placements), tensor.sizes());
  if (at::GradMode::is_enabled() && tensor.requires_grad() && !tensor.is_leaf())
    return Distribute::apply(tensor, spec);
  at::Tensor result;
  {
    at::NoGradGuard no_grad;
    result = with_part(tensor.detach(), spec);
  }
  if (tensor.requires_grad()) {
    result.requires_grad_(true);
    place_gradients(result);
  }
  return result;
}

void distribute_(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.is_leaf(),
                    "[distribute_] `tensor` must be a parameter or a buffer; got ",
                    tensor.defined() ? "the result of an operator" : "an undefined tensor");
  at::NoGradGuard no_grad;
  const bool was_dist = is_dist(tensor);
  const auto parameter = was_dist ? dist_meta("distribute_", tensor).parameter : nullptr;
  const at::Tensor placed = was_dist ? redistribute(tensor.detach(), mesh, std::move(placements))
                                     : distribute(tensor.detach(), mesh, std::move(placements));
  tensor.mutable_grad().reset();
  const DistMeta& meta = dist_meta("distribute_", placed);
  tensor.set_data(make_dist(meta.local, meta.spec, placed.sizes(), placed.strides(), parameter));
  if (tensor.requires_grad()) place_gradients(tensor);
}

at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                      std::optional<std::vector<int64_t>> sizes) {
  TORCH_CHECK_VALUE(local.defined() && !is_dist(local),
                    "[from_local] `local` must be an ordinary tensor");
  register_dist_operators();
  const auto whole =
      sizes ? std::move(*sizes)
            : global_sizes(local, mesh, normalize(placements, mesh.ndim(), local.dim()));
  const DistSpecPtr spec = checked_spec("from_local", mesh, std::move(placements), whole);
  check_part(local, *spec, whole);
  return FromLocal::apply(local, spec, whole);
}

at::Tensor to_local(const at::Tensor& tensor) {
  const DistSpecPtr& spec = dist_meta("to_local", tensor).spec;
  const bool is_pending = std::ranges::any_of(spec->placements, is_partial);
  return ToLocal::apply(tensor,
                        is_pending ? intern(spec->mesh, without_partial(spec->placements)) : spec);
}

at::Tensor to_local(const at::Tensor& tensor, Placements gradient_placements) {
  const DistSpec& own = *dist_meta("to_local", tensor).spec;
  const DistSpecPtr spec =
      checked_spec("to_local", own.mesh, std::move(gradient_placements), tensor.sizes());
  for (size_t i = 0; i < own.placements.size(); ++i) {
    const Placement &mine = own.placements[i], &gradient = spec->placements[i];
    TORCH_CHECK_VALUE(is_shard(mine) || is_shard(gradient) ? mine == gradient : true,
                      "[to_local] the gradient of a part must be cut as the part is; expected ",
                      to_string(own.placements),
                      " with `Replicate` or `Partial` where it is not cut, got ",
                      to_string(spec->placements));
  }
  // A leaf accumulates gradients in its own placements.
  if (at::GradMode::is_enabled() && tensor.requires_grad() && tensor.is_leaf())
    place_gradients(tensor);
  return ToLocal::apply(tensor, spec);
}

at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements) {
  const DistSpecPtr before = dist_meta("redistribute", tensor).spec;
  const DistSpecPtr spec =
      checked_spec("redistribute", mesh, std::move(placements), tensor.sizes());
  if (*spec == *before) return tensor;
  const at::Tensor made = Redistribute::apply(tensor, spec);
  // The gradient of a gathered tensor comes as terms, if operators cut what they read.
  if (mesh == before->mesh) reduce_gradients_to(made, before);
  return made;
}

at::Tensor redistribute(const at::Tensor& tensor, Placements placements) {
  return redistribute(tensor, dist_meta("redistribute", tensor).spec->mesh, std::move(placements));
}

at::Tensor full_tensor(const at::Tensor& tensor) {
  const DeviceMesh& mesh = dist_meta("full_tensor", tensor).spec->mesh;
  TORCH_CHECK_VALUE(mesh.is_member(), "[full_tensor] this rank must be one of the mesh ",
                    mesh.to_string());
  return to_local(redistribute(tensor, replicated(mesh)));
}

const DeviceMesh& mesh_of(const at::Tensor& tensor) {
  return dist_meta("mesh_of", tensor).spec->mesh;
}

const Placements& placements_of(const at::Tensor& tensor) {
  return dist_meta("placements_of", tensor).spec->placements;
}

std::string describe(const at::Tensor& tensor) {
  const DistMeta& meta = dist_meta("describe", tensor);
  const std::string part =
      meta.spec->mesh.is_member()
          ? fmt::format("this rank has [{}]", fmt::join(meta.local.sizes(), ", "))
          : "this rank has no part";
  return fmt::format("DistTensor(sizes [{}], {}, {}, {}, {})", fmt::join(tensor.sizes(), ", "),
                     c10::toString(tensor.scalar_type()), meta.spec->mesh.to_string(),
                     to_string(meta.spec->placements), part);
}

std::ostream& print_tensor(std::ostream& stream, const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  if (!is_dist(tensor)) return stream << tensor;
  return stream << describe(tensor) << '\n' << to_local(tensor);
}

}  // namespace tessera
