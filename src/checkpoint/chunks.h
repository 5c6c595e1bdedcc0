#pragma once

#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/model_view.h"

namespace tessera {

/// What one rank contributes to a checkpoint.
struct RankContents {
  CheckpointIndex index;  ///< of the chunks of this rank; rank 0 adds what all ranks know alike
  std::vector<NamedTensor> chunks;  ///< 1-D views of the memory of shards and optimizer state
};

/// Cuts out this rank's chunks: each element of the optimizer's state and of the model (if not
/// `with_model`: of its master weights only) is in exactly one chunk of one rank. Changes and
/// copies nothing (but what is not laid out like its parameter).
RankContents contents_of_rank(const ModelView& view, int rank, int size, bool with_model);

/// True if both strides put the elements of `sizes` into the same order.
bool is_same_order(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b);

}  // namespace tessera
