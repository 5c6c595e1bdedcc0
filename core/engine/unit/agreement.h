#pragma once

#include <tessera/engine/shard_plan.h>

#include <string>
#include <vector>

#include "engine/unit/layout.h"
#include "tensor/shard_mesh.h"

namespace tessera {

/// Returns the first line of text in which some rank differs from rank 0, with the ranks; empty if
/// all have the same lines. Collective.
std::string first_difference(const ShardMesh& mesh, const std::vector<std::string>& lines,
                             const CollectiveTag& tag);

/// Throws `c10::ValueError` on every rank unless all of them have the same lines of text. The
/// message begins with `must`, and tells the first line that differs, and the ranks. Collective.
void check_same_lines(const ShardMesh& mesh, const std::vector<std::string>& lines,
                      const std::string& must);

/// Returns a hash of the tensor's values, or of this rank's part of a DistTensor.
std::string hash_of(const at::Tensor& tensor);

/// Throws on every rank unless all of them have the same parameters and plan. The message names the
/// first parameter or member of the plan that differs, and the ranks. Collective.
void check_same_model(const ShardMesh& mesh, const std::vector<ParamSlot>& params,
                      const ShardPlan& plan);

}  // namespace tessera
