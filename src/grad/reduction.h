#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "mesh/shard_mesh.h"

namespace tessera {

/// A reduction of gradients that is under way, of one unit or of several: over the shard dim, and
/// then, in its place, over the replicate dim.
class Reduction {
 public:
  /// All ranks: starts it. `out` is this rank's part of the sum; see `ProcessGroup::reduce_scatter`
  /// for what is given. `subject` must live as long as the mesh is used.
  Reduction(const ShardMesh& mesh, const at::Tensor& out, std::vector<Piece> pieces,
            std::span<const int64_t> bounds, const ReduceScatterOptions& options,
            std::string_view subject);

  /// All ranks, with a replicate dim: waits for the sum, and starts adding up those of the
  /// replicas.
  void replicate();
  void wait() { work_->wait(); }
  bool is_completed() { return work_->is_completed(); }

 private:
  const ShardMesh& mesh_;
  at::Tensor out_;
  std::string_view subject_;
  WorkPtr work_;
};

}  // namespace tessera
