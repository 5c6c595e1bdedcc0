#pragma once

#include <tessera/fully_shard.h>

#include <vector>

namespace tessera {

class ShardedState;

/// A call that clips a sharded model's gradients, the same on all ranks.
struct ClipCall {
  double max_norm = 0;
  double norm_type = 2;
  double epsilon = 0;
  std::vector<std::vector<bool>> counted;  ///< by unit and slot

  /// Throws `c10::ValueError` for options that don't fit the model or are out of range.
  ClipCall(const ShardedState& state, double max_norm, const ClipOptions& options);
  /// From the numbers that `values()` returned on another rank.
  ClipCall(const ShardedState& state, const std::vector<double>& values);
  std::vector<double> values() const;

  /// Clips, and returns the norm before clipping. Collective.
  double run(ShardedState& state) const;

 private:
  void count_all(const ShardedState& state);
};

}  // namespace tessera
