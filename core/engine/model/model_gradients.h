#pragma once

#include <vector>

#include "engine/model/sharded_state.h"

namespace tessera {

/// See the functions of these names of `ShardedModule`.
at::Tensor full_grad(ShardedState& state, const ParamIndex& place);
void set_full_grad(ShardedState& state, const ParamIndex& place, const at::Tensor& value);
at::Tensor local_grad(ShardedState& state, const ParamIndex& place);
bool has_grad(ShardedState& state, const ParamIndex& place);
bool has_reduced_grad(ShardedState& state, const ParamIndex& place);

/// A call that clips the gradients, the same on all ranks.
struct ClipCall {
  double max_norm, norm_type, epsilon;
  std::vector<double> counted;  ///< 1 for each parameter that takes part, else 0; by unit and slot

  /// The call as `JoinScope` sends it.
  std::vector<double> numbers() const;
  static ClipCall from(const std::vector<double>& numbers);
};

/// Throws `c10::ValueError` for options that don't fit the model or are out of range.
ClipCall clip_call(const ShardedState& state, double max_norm, const ClipOptions& options);
/// Carries out a call of this or another rank; returns the norm before clipping. Collective.
double clip(ShardedState& state, const ClipCall& call);

}  // namespace tessera
