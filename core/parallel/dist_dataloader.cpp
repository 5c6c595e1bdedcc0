#include <ATen/ops/empty.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>
#include <tessera/parallel/dist_dataloader.h>
#include <tessera/parallel/distribute_module.h>

#include <algorithm>
#include <numeric>

#include "tensor/chunks.h"

namespace tessera::detail {
namespace {

std::optional<int64_t> dim_of(const MeshDim& which, const DeviceMesh& mesh) {
  if (const auto* name = std::get_if<std::string>(&which)) return mesh.dim(*name);
  if (const auto* number = std::get_if<int64_t>(&which))
    return c10::maybe_wrap_dim(*number, mesh.ndim());
  return std::nullopt;
}

Placements batch_placements(const DeviceMesh& mesh, std::optional<int64_t> mesh_dim) {
  Placements placements(mesh.ndim(), Replicate{});
  if (mesh_dim) placements[*mesh_dim] = Shard{0};
  return placements;
}

}  // namespace

InputPlacement::InputPlacement(std::vector<DeviceMesh> meshes, DistDataloaderOptions options)
    : meshes_(std::move(meshes)), options_(std::move(options)) {
  TORCH_CHECK_VALUE(!meshes_.empty(), "[distribute_dataloader] there must be a mesh; got none");
  const auto& dims = options_.mesh_dims;
  TORCH_CHECK_VALUE(
      dims.size() <= 1 || dims.size() == meshes_.size(),
      "[distribute_dataloader] mesh_dims must be one for all meshes, or one for each; expected ",
      meshes_.size(), ", got ", dims.size());
  for (size_t i = 0; i < meshes_.size(); ++i)
    dims_.push_back(dims.empty() ? std::nullopt
                                 : dim_of(dims.size() == 1 ? dims[0] : dims[i], meshes_[i]));
}

at::Tensor InputPlacement::place(const at::Tensor& input, size_t index, size_t count) const {
  TORCH_CHECK_VALUE(
      meshes_.size() == 1 || meshes_.size() == count,
      "[distribute_dataloader] with several meshes a batch must have an item for each; expected ",
      meshes_.size(), ", got ", count);
  const size_t which = meshes_.size() == 1 ? 0 : index;
  const DeviceMesh& mesh = meshes_[which];
  const std::optional<int64_t> mesh_dim = dims_[which];
  if (mesh_dim && options_.is_split) return join(input, mesh, *mesh_dim);
  if (options_.check_values) check_same_values({{"input " + std::to_string(index), input}}, mesh);
  return distribute(input, mesh, batch_placements(mesh, mesh_dim));
}

at::Tensor InputPlacement::place(const at::Tensor& input, const std::string& key,
                                 size_t count) const {
  const auto& keys = options_.keys;
  if (keys.empty() && meshes_.size() == 1) return place(input, 0, 1);
  const auto found = std::find(keys.begin(), keys.end(), key);
  TORCH_CHECK_VALUE(found != keys.end(),
                    "[distribute_dataloader] keys must be the names of the batch; '", key,
                    "' is not one of ", c10::ArrayRef<std::string>(keys));
  return place(input, static_cast<size_t>(found - keys.begin()), count);
}

// Joins the rows of each rank of the mesh dim into one batch.
at::Tensor InputPlacement::join(const at::Tensor& part, const DeviceMesh& mesh,
                                int64_t mesh_dim) const {
  TORCH_CHECK_VALUE(
      part.dim() > 0,
      "[distribute_dataloader] an input that is split must have a first dim; got a scalar");
  const Placements placements = batch_placements(mesh, mesh_dim);
  std::vector<int64_t> sizes = part.sizes().vec();
  if (!mesh.is_member()) {
    sizes[0] *= mesh.size(mesh_dim);
    return from_local(at::empty({0}, part.options()), mesh, placements, sizes);
  }
  std::vector<int64_t> rows;
  for (const std::string& text :
       all_gather_bytes(*mesh.process_group(mesh_dim), std::to_string(part.size(0)),
                        {"rows of the batch", Channel::kControl}))
    rows.push_back(std::stoll(text));
  const auto ranks = static_cast<int64_t>(rows.size());
  sizes[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t expected = chunk(sizes[0], ranks, r).size();
    TORCH_CHECK_VALUE(
        rows[r] == expected,
        "[distribute_dataloader] the rows of a split batch must be as torch::chunk cuts; expected ",
        expected, " of ", sizes[0], " on rank ", r, " of mesh dim ", mesh_dim, ", got ", rows[r],
        " (all: ", c10::IntArrayRef(rows),
        "). Drop the last batch, or let all ranks load whole ones");
  }
  return from_local(part, mesh, placements, sizes);
}

}  // namespace tessera::detail
