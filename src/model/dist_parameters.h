#pragma once

#include <tessera/fully_shard.h>

#include <vector>

#include "mesh/shard_mesh.h"
#include "unit/layout.h"

namespace tessera {

/// Returns the ranks that `plan` asks for, with those that hold other parts of the parameters if
/// these are DistTensors.
///
/// Throws `c10::ValueError` for DistTensors on several meshes and, with `plan.mesh_dim`, for
/// ordinary tensors, for DistTensors that are not replicated along it, and for a process group that
/// is given as well.
ShardMesh shard_mesh_of(const std::vector<NamedTensor>& parameters, const ShardPlan& plan);

/// Lets gradients arrive as one term per rank of a mesh dim, which the unit then adds up.
void sum_gradients_along(std::vector<ParamSlot>& params, int64_t mesh_dim);

}  // namespace tessera
