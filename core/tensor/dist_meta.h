#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <tessera/tensor/device_mesh.h>
#include <tessera/tensor/placement.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct ModuleFunctions;

/// How a DistTensor is placed on its mesh. Shared by all tensors that one operator's rule made.
struct DistSpec {
  DeviceMesh mesh;
  Placements placements;  ///< normalized: one per mesh dim

  bool operator==(const DistSpec&) const = default;
};
using DistSpecPtr = std::shared_ptr<const DistSpec>;

/// Returns this thread's only `DistSpec` for a mesh and normalized placements, so that equal ones
/// can be recognized by their address.
DistSpecPtr intern(const DeviceMesh& mesh, Placements placements);

/// Returns the spec of a tensor of these global sizes; `placements` need not be normalized.
///
/// Throws `c10::ValueError` that names `function` as `normalize()` does, and for splits that don't
/// cut their dim evenly, or together with another mesh dim.
DistSpecPtr checked_spec(const char* function, const DeviceMesh& mesh, Placements placements,
                         at::IntArrayRef sizes);

/// `Replicate` on every mesh dim.
inline Placements replicated(const DeviceMesh& mesh) {
  return Placements(mesh.ndim(), Replicate{});
}
/// Returns `placements` with every pending reduction done.
Placements without_partial(Placements placements);

/// Additional data of a DistTensor that is a parameter.
struct DistParameter {
  std::string name;  ///< dotted; may be empty
  /// Placements of its gradients as they are accumulated; null: the parameter's own.
  DistSpecPtr gradients;
  /// The functions of the modules whose weight this is; see mesh/module_functions.h.
  std::vector<std::shared_ptr<const ModuleFunctions>> functions;
};

class ViewSource;

/// The metadata that makes a tensor a DistTensor: carried by its `TensorImpl`, and by those of its
/// detached versions and of tensors that take its data.
struct DistMeta final : c10::BackendMeta {
  DistMeta(at::Tensor local_part, DistSpecPtr where, std::shared_ptr<ViewSource> view_of = nullptr,
           std::shared_ptr<const DistParameter> known = nullptr)
      : local(std::move(local_part)),
        spec(std::move(where)),
        source(std::move(view_of)),
        parameter(std::move(known)) {}

  /// Sets the local part after pending reductions of the tensor; see mesh/placed.h, the only
  /// caller.
  void reduce_to(at::Tensor part, DistSpecPtr where) {
    before_ = std::exchange(spec, std::move(where));
    local = std::move(part);
  }

  at::Tensor local;  ///< without autograd
  DistSpecPtr spec;
  /// Set for a view whose local part is a copy; see `local_part()` in mesh/view_source.h.
  std::shared_ptr<ViewSource> source;
  const std::shared_ptr<const DistParameter> parameter;  ///< null for other tensors
  /// For a view of a parameter: that parameter.
  std::shared_ptr<const DistParameter> shown_parameter;
  /// Counts writes to this tensor and to its views, as one; without views, there is no counter.
  c10::VariableVersion writes;
  mutable uint64_t identity = 0;  ///< see [Note: Identities]
  bool reduces_once = false;      ///< the first operator that needs the values reduces them for all
  bool is_shown = false;          ///< other DistTensors may share the memory of `local`
  bool shows_expanded = false;    ///< a copy (see `source`) of a view of an expanded tensor

 private:
  DistSpecPtr before_;  // users may hold references to it
};

/// Returns the meta of `tensor`; null for an ordinary tensor.
const DistMeta* find_dist_meta(const at::Tensor& tensor);
/// As above, but throws `c10::ValueError` for an ordinary tensor; the message names `function`.
const DistMeta& dist_meta(const char* function, const at::Tensor& tensor);

/// Returns this rank's part of a DistTensor; an ordinary tensor itself.
const at::Tensor& local_of(const at::Tensor& tensor);

/// Makes a DistTensor with these global sizes and strides, without autograd; with `parameter`, it
/// is a parameter.
at::Tensor make_dist(at::Tensor local, DistSpecPtr spec, at::IntArrayRef sizes,
                     at::IntArrayRef strides,
                     std::shared_ptr<const DistParameter> parameter = nullptr);
/// Makes it contiguous.
at::Tensor make_dist(at::Tensor local, DistSpecPtr spec, at::IntArrayRef sizes);
/// Gives it the sizes of `like`, and the order of its dims in memory; copies a `local` that lies
/// otherwise.
at::Tensor make_dist_like(const at::Tensor& local, DistSpecPtr spec, const at::Tensor& like);
/// Returns `part` with its dims in memory as those of `whole`; itself, if it lies so.
at::Tensor ordered_as(const at::Tensor& whole, const at::Tensor& part);
/// Makes a view that would start at element `offset` of its base's memory, if the base had any.
at::Tensor make_dist_view(at::Tensor local, DistSpecPtr spec, at::IntArrayRef sizes,
                          at::IntArrayRef strides, int64_t offset,
                          std::shared_ptr<ViewSource> source);

}  // namespace tessera
