#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "mesh/shard_mesh.h"

namespace tessera {

/// A reduction of gradients in flight, of one unit or of several: over the shard dim, and then, in
/// place, over the replicate dim.
class Reduction {
 public:
  /// Starts the reduction. All ranks must call it. `out` is this rank's part of the sum; see
  /// `ProcessGroup::reduce_scatter` for the other arguments. `subject` must live as long as the
  /// mesh is used.
  Reduction(const ShardMesh& mesh, const at::Tensor& out, std::vector<Piece> pieces,
            std::span<const int64_t> bounds, const ReduceScatterOptions& options,
            std::string_view subject);

  /// All ranks, with a replicate dim: waits for the sum, then starts adding up the sums of the
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
