#include "tensor/dist_meta.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <vector>

#include "base/device/device.h"
#include "base/dispatch/math_bits.h"
#include "tensor/identity.h"
#include "tensor/module_functions.h"
#include "tensor/view_source.h"

namespace tessera {

// [Note: What a DistTensor is]
//
// A TensorImpl with the global sizes and no memory. It has two backend bits: the higher one,
// PrivateUse3, sends every operator to this library (see dist_dispatch.cpp); by the lower one, it
// reports itself as a tensor of the device of its local part. Autograd works above that, on the
// global tensor: it saves and accumulates DistTensors, and derivative formulas are sequences of
// operators on them. The bit of meta tensors is higher than PrivateUse3: a DistTensor of meta parts
// has that of the CPU in its place, and device() says what it is.

namespace {

// The error of `storage()` and `data_ptr()`. LibTorch's own functions for saving a tensor call
// them.
constexpr const char* kNoMemory =
    "A DistTensor has no memory of its own. To save it call save_checkpoint() or "
    "save_state_dict(); "
    "full_tensor() gives all values, to_local() those of this rank";

at::Tensor make_with(c10::intrusive_ptr<DistMeta> meta, at::IntArrayRef sizes,
                     at::IntArrayRef strides, int64_t offset) {
  if (meta->local._is_zerotensor()) meta->local = with_plain_memory(meta->local);
  const at::Tensor& local = meta->local;
  TORCH_INTERNAL_ASSERT(!local.requires_grad() && !find_dist_meta(local));
  meta->identity = next_identity(*meta->spec, meta->parameter.get());
  TORCH_CHECK_NOT_IMPLEMENTED(local.layout() == at::kStrided,
                              "[tessera] a DistTensor must be dense; expected parts of layout "
                              "Strided, got ",
                              local.layout(), ". Make such tensors of to_local() or full_tensor()");
  constexpr c10::DispatchKeySet kOwnKeys({c10::DispatchKey::PrivateUse3,
                                          c10::DispatchKey::AutogradPrivateUse3,
                                          c10::DispatchKey::ADInplaceOrView});
  const c10::DispatchKey device = backend_key(local.is_meta() ? at::kCPU : local.device().type());
  auto keys = kOwnKeys | c10::DispatchKeySet(device);
  // A tensor gets the key of autocast for its highest backend only.
  if (!local.is_meta())
    keys = keys | c10::getAutocastRelatedKeySetFromBackend(c10::toBackendComponent(device));
  if (meta->parameter && !meta->parameter->functions.empty()) keys = keys.add(kModuleKey);
  // LibTorch then copies before it calls operators that don't know these marks, or have to write.
  if (local.is_conj()) keys = keys.add(c10::DispatchKey::Conjugate);
  if (local.is_neg()) keys = keys.add(c10::DispatchKey::Negative);
  auto impl = c10::make_intrusive<c10::TensorImpl>(keys, local.dtype(), local.device());
  impl->set_sizes_and_strides(sizes, strides, offset);
  impl->set_backend_meta(std::move(meta));
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  return at::Tensor(std::move(impl));
}

// `part` with its dims in memory in the order that the strides of a dense whole have.
at::Tensor ordered(const at::Tensor& part, at::IntArrayRef strides) {
  if (part.dim() != std::ssize(strides)) return part;  // of a rank outside of the mesh
  const auto wanted = at::infer_dense_strides(part.sizes(), strides);
  for (int64_t dim = 0; dim < part.dim(); ++dim) {
    if (part.size(dim) > 1 && part.stride(dim) != wanted[dim])
      return at::empty_strided(part.sizes(), wanted, part.options()).copy_(part);
  }
  return part;
}

// A split must cut its dim evenly, and no other mesh dim may shard that dim.
void check_splits(const char* function, const DistSpec& spec, at::IntArrayRef sizes) {
  for (int64_t i = 0; i < spec.mesh.ndim(); ++i) {
    if (!is_split(spec.placements[i])) continue;
    const auto& [dim, factor] = std::get<Shard>(spec.placements[i]);
    const int64_t ranks = spec.mesh.size(i);
    TORCH_CHECK_VALUE(sizes[dim] % (factor * ranks) == 0, "[", function,
                      "] a dim with a split must be a multiple of the split factor times the ranks "
                      "of the mesh dim; expected one of ",
                      factor, " * ", ranks, ", got dim ", dim, " of size ", sizes[dim], " (",
                      to_string(spec.placements), ")");
    for (int64_t j = 0; j < spec.mesh.ndim(); ++j)
      TORCH_CHECK_VALUE(j == i || !is_shard(spec.placements[j], dim), "[", function,
                        "] only one mesh dim may shard a dim with a split; got dim ", dim,
                        " sharded by mesh dims ", i, " and ", j, " (", to_string(spec.placements),
                        ")");
  }
}

}  // namespace

DistSpecPtr intern(const DeviceMesh& mesh, Placements placements) {
  thread_local std::vector<std::weak_ptr<const DistSpec>> known;
  for (const auto& candidate : known) {
    const DistSpecPtr spec = candidate.lock();
    if (spec && spec->mesh.is_same(mesh) && spec->placements == placements) return spec;
  }
  std::erase_if(known, [](const auto& spec) { return spec.expired(); });
  auto made = std::make_shared<const DistSpec>(DistSpec{mesh, std::move(placements)});
  known.push_back(made);
  return made;
}

DistSpecPtr checked_spec(const char* function, const DeviceMesh& mesh, Placements placements,
                         at::IntArrayRef sizes) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  DistSpecPtr spec = intern(mesh, normalize(std::move(placements), mesh.ndim(), ndim));
  check_splits(function, *spec, sizes);
  return spec;
}

Placements without_partial(Placements placements) {
  for (Placement& placement : placements) {
    if (is_partial(placement)) placement = Replicate{};
  }
  return placements;
}

const DistMeta* find_dist_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has_backend(c10::BackendComponent::PrivateUse3Bit))
    return nullptr;
  return dynamic_cast<const DistMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

const DistMeta& dist_meta(const char* function, const at::Tensor& tensor) {
  const DistMeta* const meta = find_dist_meta(tensor);
  TORCH_CHECK_VALUE(meta, "[", function, "] `tensor` must be a DistTensor; got ",
                    tensor.defined() ? "an ordinary tensor; distribute() makes one of it"
                                     : "an undefined tensor");
  return *meta;
}

const at::Tensor& local_of(const at::Tensor& tensor) {
  const DistMeta* const meta = find_dist_meta(tensor);
  return meta ? local_part(*meta) : tensor;
}

at::Tensor make_dist(at::Tensor local, DistSpecPtr spec, at::IntArrayRef sizes,
                     at::IntArrayRef strides, std::shared_ptr<const DistParameter> parameter) {
  return make_with(c10::make_intrusive<DistMeta>(std::move(local), std::move(spec), nullptr,
                                                 std::move(parameter)),
                   sizes, strides, 0);
}

// Autograd reads the offset when it writes the gradient of a view into that of its base.
at::Tensor make_dist_view(at::Tensor local, DistSpecPtr spec, at::IntArrayRef sizes,
                          at::IntArrayRef strides, int64_t offset,
                          std::shared_ptr<ViewSource> source) {
  return make_with(
      c10::make_intrusive<DistMeta>(std::move(local), std::move(spec), std::move(source)), sizes,
      strides, offset);
}

at::Tensor make_dist(at::Tensor local, DistSpecPtr spec, at::IntArrayRef sizes) {
  return make_dist(std::move(local), std::move(spec), sizes, c10::contiguous_strides(sizes));
}

at::Tensor make_dist_like(const at::Tensor& local, DistSpecPtr spec, const at::Tensor& like) {
  const auto strides = at::infer_dense_strides(like.sizes(), like.strides());
  return make_dist(ordered(local, strides), std::move(spec), like.sizes(), strides);
}

at::Tensor ordered_as(const at::Tensor& whole, const at::Tensor& part) {
  if (whole.is_contiguous()) return part.contiguous();
  if (whole.is_non_overlapping_and_dense()) return ordered(part, whole.strides());
  // The order of a strided tensor's dims, too, is that of what a kernel makes of it.
  const bool same = part.dim() != whole.dim() || std::ranges::count(whole.strides(), 0) > 0 ||
                    at::infer_dense_strides(part.sizes(), part.strides()) ==
                        at::infer_dense_strides(part.sizes(), whole.strides());
  return same ? part : ordered(part, whole.strides());
}

}  // namespace tessera
