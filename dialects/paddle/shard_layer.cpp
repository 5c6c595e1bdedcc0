#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>
#include <tessera/dialects/paddle_shard_layer.h>
#include <tessera/init/deferred_init.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <set>

#include "tensor/chunks.h"

namespace tessera::paddle {
namespace {

using Shape = std::vector<int64_t>;

std::vector<int> checked_ids(const std::vector<int64_t>& ids) {
  std::vector<int> ranks;
  for (const int64_t id : ids) {
    TORCH_CHECK_VALUE(id >= 0, "All elements of the mesh must be >= 0. Got ", id);
    ranks.push_back(static_cast<int>(id));
  }
  const std::set<int> distinct(ranks.begin(), ranks.end());
  TORCH_CHECK_VALUE(distinct.size() == ranks.size(),
                    "All elements of the mesh must be unique. Got ", c10::ArrayRef<int>(ranks));
  return ranks;
}

std::vector<std::string> checked_names(std::vector<std::string> names, size_t ndim) {
  TORCH_CHECK_VALUE(names.empty() || names.size() == ndim,
                    "The length of dims_names must be same as the shape of the mesh. Expected ",
                    ndim, ", got ", names.size());
  const std::set<std::string> distinct(names.begin(), names.end());
  TORCH_CHECK_VALUE(distinct.size() == names.size(), "All dim_names ",
                    c10::ArrayRef<std::string>(names), " must be unique.");
  return names;
}

DeviceMesh make_mesh(const MeshArray& mesh, std::vector<std::string> names) {
  TORCH_CHECK_VALUE(!mesh.shape.empty() && !mesh.ranks.empty(),
                    "The mesh must be an array with elements; got an empty one");
  return {mesh.shape, checked_ids(mesh.ranks), checked_names(std::move(names), mesh.shape.size())};
}

MeshArray to_array(const at::Tensor& mesh) {
  TORCH_CHECK_VALUE(mesh.defined() && c10::isIntegralType(mesh.scalar_type(), false),
                    "All elements of the mesh must be integer");
  const at::Tensor flat = mesh.to(at::kLong).to(at::kCPU).contiguous();
  const auto* ids = flat.const_data_ptr<int64_t>();
  MeshArray array(0);
  array.shape = mesh.sizes().vec();
  array.ranks = {ids, ids + flat.numel()};
  return array;
}

at::Tensor as_tensor(const ShardTensorData& data, const ShardTensorOptions& options) {
  if (const auto* tensor = std::get_if<at::Tensor>(&data)) return *tensor;
  if (const auto* number = std::get_if<c10::Scalar>(&data)) {
    const auto type = number->isIntegral(false) ? at::kLong
                      : number->isBoolean()     ? at::kBool
                                                : at::kFloat;
    return at::scalar_tensor(*number, at::dtype(options.dtype.value_or(type)));
  }
  return at::tensor(std::get<std::vector<double>>(data), at::kDouble)
      .to(options.dtype.value_or(at::kFloat));
}

at::Tensor converted(at::Tensor tensor, const ShardTensorOptions& options) {
  if (options.dtype) tensor = tensor.to(*options.dtype);
  return options.place ? tensor.to(*options.place) : tensor;
}

// Places a parameter of the layer that is being sharded.
at::Tensor place_itself(at::Tensor tensor, const DeviceMesh& mesh, const Placements& placements,
                        const ShardTensorOptions& options) {
  const bool converts = (options.dtype && *options.dtype != tensor.scalar_type()) ||
                        (options.place && *options.place != tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(!converts,
                              "[shard_tensor] a parameter of the layer keeps its dtype and device; "
                              "convert the layer before shard_layer()");
  if (options.stop_gradient) tensor.requires_grad_(!*options.stop_gradient);
  distribute_(tensor, mesh, placements);
  return tensor;
}

std::optional<int64_t> mesh_dim_of(const ShardingStage& stage,
                                   const torch::optim::Optimizer& optimizer) {
  const DeviceMesh* mesh = stage.mesh ? &*stage.mesh : nullptr;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (!is_dist(param)) continue;
      TORCH_CHECK_VALUE(
          !stage.mesh || *stage.mesh == mesh_of(param),
          "[shard_optimizer] the stage's mesh must be that of the parameters; expected ",
          mesh_of(param).to_string(), ", got ", stage.mesh ? stage.mesh->to_string() : "");
      if (!mesh) mesh = &mesh_of(param);
    }
  }
  if (const auto* number = std::get_if<int64_t>(&stage.sharding_mesh_dim)) return *number;
  const auto* name = std::get_if<std::string>(&stage.sharding_mesh_dim);
  if (!name) return std::nullopt;
  TORCH_CHECK_VALUE(mesh,
                    "[shard_optimizer] a stage needs parameters that are DistTensors; none is");
  return mesh->dim(*name);
}

}  // namespace

MeshArray::MeshArray(std::initializer_list<MeshArray> rows) {
  for (const MeshArray& row : rows) {
    TORCH_CHECK_VALUE(row.shape == rows.begin()->shape,
                      "All rows of the mesh must have one shape; got ",
                      c10::IntArrayRef(rows.begin()->shape), " and ", c10::IntArrayRef(row.shape));
    ranks.insert(ranks.end(), row.ranks.begin(), row.ranks.end());
  }
  if (rows.size() > 0) shape = rows.begin()->shape;
  shape.insert(shape.begin(), static_cast<int64_t>(rows.size()));
}

ProcessMesh::ProcessMesh(const at::Tensor& mesh, std::vector<std::string> dim_names)
    : DeviceMesh(make_mesh(to_array(mesh), std::move(dim_names))) {}
ProcessMesh::ProcessMesh(std::initializer_list<MeshArray> mesh, std::vector<std::string> dim_names)
    : DeviceMesh(make_mesh(MeshArray(mesh), std::move(dim_names))) {}

at::Tensor shard_tensor(const ShardTensorData& data, const DeviceMesh& mesh,
                        const Placements& placements, const ShardTensorOptions& options) {
  const at::Tensor tensor = as_tensor(data, options);
  TORCH_CHECK_VALUE(tensor.defined(),
                    "[shard_tensor] `data` must have values; got an undefined tensor");
  TORCH_CHECK_VALUE(
      !is_deferred(tensor) || std::none_of(placements.begin(), placements.end(), is_partial),
      "[shard_tensor] a deferred tensor can't be Partial: its terms have no values to come from; "
      "got ",
      to_string(placements));
  if (tessera::detail::is_being_placed(tensor))
    return place_itself(tensor, mesh, placements, options);
  at::Tensor result = is_dist(tensor) ? redistribute(converted(tensor, options), mesh, placements)
                                      : distribute(converted(tensor, options), mesh, placements);
  if (options.stop_gradient && *options.stop_gradient == result.requires_grad())
    result = result.detach().requires_grad_(!*options.stop_gradient);
  return result;
}

at::Tensor dtensor_from_local_list(const std::vector<at::Tensor>& local_tensor_list,
                                   const DeviceMesh& mesh, const Placements& placements,
                                   int64_t local_mesh_dim) {
  const int64_t dim = c10::maybe_wrap_dim(local_mesh_dim, mesh.ndim());
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(local_tensor_list.size()) == mesh.size(dim),
      "[dtensor_from_local_list] there must be a tensor for each slice of the mesh; expected ",
      mesh.size(dim), ", got ", local_tensor_list.size());
  const int64_t own = mesh.coordinate() ? (*mesh.coordinate())[dim] : 0;
  const at::Tensor& slice = local_tensor_list[own];
  const Placements all = normalize(placements, mesh.ndim(), slice.dim());
  Shape sizes = slice.sizes().vec();
  if (const auto* shard = std::get_if<Shard>(&all[dim])) {
    sizes[shard->dim] = 0;
    for (const at::Tensor& tensor : local_tensor_list) sizes[shard->dim] += tensor.size(shard->dim);
  }
  return from_local(to_local(slice), mesh, all, sizes);
}

std::vector<at::Tensor> local_tensor_list_from_dtensor(const at::Tensor& dist_tensor,
                                                       int64_t local_mesh_dim) {
  const DeviceMesh& mesh = mesh_of(dist_tensor);
  const int64_t dim = c10::maybe_wrap_dim(local_mesh_dim, mesh.ndim());
  Placements placements = placements_of(dist_tensor);
  const auto* const shard = std::get_if<Shard>(&placements[dim]);
  const int64_t cut = shard ? shard->dim : -1;  // the tensor dim that the slices cut
  const int64_t parts = mesh.size(dim);
  placements.erase(placements.begin() + dim);
  if (mesh.ndim() == 1) placements = {Replicate{}};
  std::vector<at::Tensor> list;
  for (int64_t i = 0; i < parts; ++i) {
    Shape sizes = dist_tensor.sizes().vec();
    if (cut >= 0) sizes[cut] = chunk(sizes[cut], parts, i).size();
    const DeviceMesh slice = mesh.select(dim, i);
    const at::Tensor local = slice.is_member()
                                 ? to_local(dist_tensor)
                                 : at::empty({0}, at::dtype(dist_tensor.scalar_type()));
    list.push_back(from_local(local, slice, placements, sizes));
  }
  return list;
}

const DeviceMesh& detail::check_mesh(const std::optional<DeviceMesh>& process_mesh) {
  TORCH_CHECK_VALUE(process_mesh, "The argument `process_mesh` cannot be empty.");
  return *process_mesh;
}

void shard_layer(torch::jit::Module&, const std::optional<DeviceMesh>&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "[shard_layer] a scripted module can't be sharded by layers: its "
                              "graph is fixed. fully_shard() shards it over ranks as it is");
}

DistOptimizer shard_optimizer(torch::optim::Optimizer* optimizer, const ShardOptimizerFn& shard_fn,
                              const ShardOptimizerOptions& options) {
  TORCH_CHECK_VALUE(optimizer, "The argument `optimizer` cannot be empty.");
  DistOptimizerOptions plan{.elementwise = options.elementwise};
  if (options.multi_precision) plan.master_dtype = at::kFloat;
  if (const auto* place = std::get_if<StatePlacementFn>(&shard_fn)) plan.place_state = *place;
  if (const auto* stage = std::get_if<ShardingStage>(&shard_fn)) {
    plan.level = stage->level;
    plan.mesh_dim = mesh_dim_of(*stage, *optimizer);
  }
  return {*optimizer, std::move(plan)};
}

}  // namespace tessera::paddle
