#pragma once

#include <tessera/shard_plan.h>

#include <string>
#include <vector>

#include "mesh/shard_mesh.h"
#include "unit/layout.h"

namespace tessera {

/// Throws `c10::ValueError` on every rank unless all of them have the same lines of text. The
/// message begins with `must`, and tells the first line that differs, and the ranks. Collective.
void check_same_lines(const ShardMesh& mesh, const std::vector<std::string>& lines,
                      const std::string& must);

/// Throws on every rank unless all of them have the same parameters and plan. The message names the
/// first parameter or member of the plan that differs, and the ranks. Collective.
void check_same_model(const ShardMesh& mesh, const std::vector<ParamSlot>& params,
                      const ShardPlan& plan);

}  // namespace tessera
