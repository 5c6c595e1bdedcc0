#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "model/sharded_state.h"

namespace tessera {

/// A parameter or buffer that one rank stores whole and contiguous, under its plain name.
struct WholeTensor {
  TensorRecord record;
  int writer = 0;  ///< rank
};

/// Returns the rank of `Ranks::of(state.mesh())` that stores each tensor: those of unit u belong to
/// rank `u % size`, ignored parameters and buffers to rank 0. The same on all ranks.
std::vector<WholeTensor> plan_whole_model(const ShardedState& state);

/// Gathers the units one after another; each is written by its rank into that rank's model file.
/// Returns the plan with the chunks that this rank has written; rank 0's has all tensors, other
/// ranks' only their own.
///
/// Collective. A rank that can't write still gathers with the others; then all throw its error.
/// **Memory**: one gathered unit, and one parameter of it that is not laid out contiguously.
std::vector<TensorRecord> write_whole_model(ShardedState& state,
                                            const std::vector<WholeTensor>& plan,
                                            const std::filesystem::path& directory,
                                            const std::string& id);

}  // namespace tessera
