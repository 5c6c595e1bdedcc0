#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dist_part.h"
#include "checkpoint/index.h"
#include "checkpoint/model_view.h"

namespace tessera {

/// The elements of a chunk, 1-D.
struct ChunkData {
  std::string key;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  /// Called once, when they are written: a view of the memory of shards or optimizer state, or what
  /// is read only then. Its memory holds the values.
  std::function<at::Tensor()> get;

  int64_t nbytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};
/// Of a tensor that is there.
ChunkData chunk_of(std::string key, const at::Tensor& data);

/// What one rank contributes to a checkpoint.
struct RankContents {
  CheckpointIndex index;  ///< of the chunks of this rank; rank 0 adds what all ranks know alike
  std::vector<ChunkData> chunks;
};

/// Collects what this rank, `rank` of `size`, stores: each element of what all ranks add is in
/// exactly one chunk of one rank. Changes and copies nothing (but what is not laid out like its
/// parameter).
class ChunkCollector {
 public:
  ChunkCollector(int rank, int size);

  /// Parameters and buffers.
  void add_model(const ModelView& view);
  /// Of parameters the master weights, if they have another dtype than what is in use.
  void add_masters(const ModelView& view);
  /// What `view.optimizer` has: state, options and param groups.
  void add_optimizer(const ModelView& view);
  /// Tensors by name: ordinary ones, which are the same on all ranks, and DistTensors.
  void add_tensors(const std::map<std::string, at::Tensor>& tensors);
  /// What this rank has for itself, as `GROUP/NAME`.
  void add_rank_state(const std::string& group, const std::map<std::string, at::Tensor>& tensors);
  /// What was stored already.
  void add_stored(std::vector<TensorRecord> records);

  CheckpointIndex& index() { return contents_.index; }
  RankContents take() && { return std::move(contents_); }

 private:
  void add(TensorRecord record, const Region& region, const at::Tensor& data);
  void add_part(TensorRecord record, const ParamView& param, const at::Tensor& values);
  void add_shared(TensorRecord record, const at::Tensor& tensor, Replica replica);
  void add_states(const ModelView& view, const ParamView& param, const at::Tensor& tensor);

  int rank_;
  RankContents contents_;
  ReplicaTurns turns_;
};

/// True if both strides put the elements of `sizes` into the same order.
bool is_same_order(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b);

}  // namespace tessera
