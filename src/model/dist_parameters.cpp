#include "model/dist_parameters.h"

#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>
#include <tessera/world.h>

#include <string>

#include "mesh/dist_meta.h"

namespace tessera {
namespace {

// The first parameter that is a DistTensor; the others must be on its mesh. Null: none is.
const NamedTensor* find_dist_parameter(const std::vector<NamedTensor>& parameters) {
  const NamedTensor* first = nullptr;
  for (const NamedTensor& parameter : parameters) {
    const DistMeta* const meta = find_dist_meta(parameter.tensor);
    if (!meta) continue;
    if (!first) first = &parameter;
    const DeviceMesh& mesh = dist_meta("fully_shard", first->tensor).spec->mesh;
    TORCH_CHECK_VALUE(mesh == meta->spec->mesh, "[fully_shard] all DistTensors among the parameters must lie on "
                      "one mesh; '", first->name, "' lies on ", mesh.to_string(), ", '", parameter.name, "' on ",
                      meta->spec->mesh.to_string());
  }
  return first;
}

void check_replicated(const std::vector<NamedTensor>& parameters, int64_t mesh_dim) {
  for (const NamedTensor& parameter : parameters) {
    const DistMeta* const meta = find_dist_meta(parameter.tensor);
    TORCH_CHECK_VALUE(meta && is_replicate(meta->spec->placements[mesh_dim]),
                      "[fully_shard] with plan.mesh_dim all parameters must be DistTensors that are replicated "
                      "along mesh dim ", mesh_dim, "; '", parameter.name, "' is ",
                      meta ? "placed " + to_string(meta->spec->placements) : "an ordinary tensor");
  }
}

// The ranks of the mesh that have the same coordinate along `mesh_dim` as this rank.
ProcessGroupPtr ranks_beside(const DeviceMesh& mesh, int64_t mesh_dim) {
  std::vector<std::string> names = mesh.dim_names();
  names.erase(names.begin() + mesh_dim);
  return names.empty() ? nullptr : mesh.sub_mesh(names).process_group();
}

}  // namespace

ShardMesh shard_mesh_of(const std::vector<NamedTensor>& parameters, const ShardPlan& plan) {
  const NamedTensor* const dist = find_dist_parameter(parameters);
  if (!plan.mesh_dim) {
    return {plan.process_group ? plan.process_group : default_process_group(), plan.replicate_group,
            dist ? dist_meta("fully_shard", dist->tensor).spec->mesh.process_group() : nullptr};
  }
  TORCH_CHECK_VALUE(!plan.process_group, "[fully_shard] plan.mesh_dim and plan.process_group can't both be given");
  TORCH_CHECK_VALUE(dist, "[fully_shard] with plan.mesh_dim the parameters must be DistTensors; none is");
  const DeviceMesh& mesh = dist_meta("fully_shard", dist->tensor).spec->mesh;
  const int64_t mesh_dim = c10::maybe_wrap_dim(*plan.mesh_dim, mesh.ndim());
  check_replicated(parameters, mesh_dim);
  return {mesh.process_group(mesh_dim), plan.replicate_group, ranks_beside(mesh, mesh_dim)};
}

void sum_gradients_along(std::vector<ParamSlot>& params, int64_t mesh_dim) {
  for (ParamSlot& param : params) {
    const DeviceMesh& mesh = param.dist->spec->mesh;
    Placements placements = param.dist->spec->placements;
    placements[c10::maybe_wrap_dim(mesh_dim, mesh.ndim())] = Partial{PartialOp::kSum};
    param.dist->gradients = intern(mesh, std::move(placements));
    // Along that dim each rank counts its own shard.
    Placements others = param.dist->spec->placements;
    others[c10::maybe_wrap_dim(mesh_dim, mesh.ndim())] = Partial{};
    param.dist->is_first_replica = is_first_replica({mesh, others});
  }
}

}  // namespace tessera
