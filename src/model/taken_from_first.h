#pragma once

#include <tessera/fully_shard.h>

#include <vector>

#include "mesh/shard_mesh.h"

namespace tessera {

/// Gives tensors that every rank has whole the values that rank 0 has. Collective.
class TakenFromFirst {
 public:
  /// Starts the broadcast.
  TakenFromFirst(const ShardMesh& mesh, const std::vector<NamedTensor>& tensors);
  /// Waits until the values have arrived.
  void finish();

 private:
  std::vector<at::Tensor> tensors_, packed_;
  std::vector<WorkPtr> works_;
};

}  // namespace tessera
