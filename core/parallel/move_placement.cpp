#include "parallel/move_placement.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/tensor/dist_tensor.h>

#include "tensor/dist_meta.h"
#include "tensor/gradient_placement.h"
#include "tensor/placed.h"

namespace tessera {
namespace {

Placements placed_along(const DeviceMesh& mesh, int64_t mesh_dim, const Placement& placement) {
  Placements placements = replicated(mesh);
  placements[mesh_dim] = placement;
  return placements;
}

// A pending sum that an operator left is reduced for all of its readers; see [Note: Pending
// reductions are done once].
void reduce_for_all(const at::Tensor& tensor, const Placements& to) {
  const DistMeta& meta = dist_meta("module functions", tensor);
  const bool can_reduce = meta.reduces_once && !(meta.is_shown && tensor.is_inference());
  if (!can_reduce || to == meta.spec->placements || to != without_partial(meta.spec->placements))
    return;
  const at::NoGradGuard no_grad;
  const DistSpecPtr spec = intern(meta.spec->mesh, to);
  if (spec->mesh.is_member()) {
    placed_argument(tensor, spec, "output of a module");
  } else {
    note_placed_argument(tensor, spec);
  }
}

at::Tensor move_dist(const at::Tensor& tensor, int64_t mesh_dim, const Placement& to) {
  const DistSpecPtr before = dist_meta("module functions", tensor).spec;
  Placements placements = before->placements;
  placements[mesh_dim] = to;
  placements = normalize(std::move(placements), before->mesh.ndim(), tensor.dim());
  reduce_for_all(tensor, placements);
  return redistribute(tensor, placements);
}

}  // namespace

at::Tensor move_placement(const at::Tensor& tensor, const DeviceMesh& mesh, int64_t mesh_dim,
                          const std::optional<Placement>& given, const Placement& to) {
  if (is_dist(tensor)) {
    TORCH_CHECK_VALUE(mesh_of(tensor) == mesh,
                      "[parallelize_module] tensors that go through a module must be on the mesh "
                      "of its weight; expected ",
                      mesh.to_string(), ", got ", mesh_of(tensor).to_string());
    return move_dist(tensor, mesh_dim, to);
  }
  if (given) {
    const at::Tensor parts = from_local(tensor, mesh, placed_along(mesh, mesh_dim, *given));
    return move_dist(parts, mesh_dim, to);
  }
  const bool requires_grad = at::GradMode::is_enabled() && tensor.requires_grad();
  if (is_replicate(to) && !requires_grad) return tensor;  // operators take it as it is
  // Not a leaf: the gradient must reach the tensor itself.
  return distribute(requires_grad ? tensor.view_as(tensor) : tensor.detach(), mesh,
                    placed_along(mesh, mesh_dim, to));
}

}  // namespace tessera
