#pragma once

#include <tessera/fully_shard.h>

#include <vector>

namespace tessera {

class ShardedState;

/// A clipping of a sharded model's gradients, as all ranks are to do it.
struct ClipCall {
  double max_norm = 0;
  double norm_type = 2;
  double epsilon = 0;
  std::vector<std::vector<bool>> counted;  ///< by unit and slot

  /// Throws `c10::ValueError` for options that don't fit.
  ClipCall(const ShardedState& state, double max_norm, const ClipOptions& options);
  /// From numbers that `values()` gave on another rank.
  ClipCall(const ShardedState& state, const std::vector<double>& values);
  std::vector<double> values() const;

  /// Returns the norm before. Collective.
  double run(ShardedState& state) const;

 private:
  void count_all(const ShardedState& state);
};

}  // namespace tessera
