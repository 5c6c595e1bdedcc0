#pragma once

#include <functional>

#include "mesh/shard_mesh.h"

namespace tessera {

/// Runs `work` on every rank; if it throws on any, for whatever reason, all ranks throw.
/// Collective: no rank returns before all are done.
void fail_together(const ShardMesh& mesh, const std::function<void()>& work);

}  // namespace tessera
