#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/model_view.h"

namespace tessera {

/// The elements of a chunk, 1-D.
struct ChunkData {
  std::string key;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  /// Called once, when the elements are written. Returns a view of the memory of shards or
  /// optimizer state, or reads the values only then. The memory of the result holds its values.
  std::function<at::Tensor()> get;

  int64_t nbytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};
/// Makes a chunk of an existing tensor.
ChunkData chunk_of(std::string key, const at::Tensor& data);

/// The data that one rank contributes to a checkpoint.
struct RankContents {
  CheckpointIndex index;  ///< of this rank's chunks; rank 0 adds the data common to all ranks
  std::vector<ChunkData> chunks;
  std::string name = {};                  ///< its subdirectory, for one of several models
  std::vector<RankContents> models = {};  ///< in subdirectories
};

/// Calls `visit` with the contents and those of its models.
template <class Contents, class F>
void visit_contents(Contents& contents, F&& visit) {
  visit(contents);
  for (auto& model : contents.models) visit(model);
}

/// Collects the data that this rank, `rank` of `size`, stores: each element that the ranks add is
/// in exactly one chunk of one rank. Changes nothing, and copies only tensors that are not laid out
/// like their parameter.
class ChunkCollector {
 public:
  ChunkCollector(int rank, int size);

  /// Adds parameters and buffers.
  void add_model(const ModelView& view);
  /// Adds the master weights of parameters that are used in another dtype, or rounded.
  void add_masters(const ModelView& view);
  /// Adds the state, options and param groups of `view.optimizer`.
  void add_optimizer(const ModelView& view);
  /// Adds tensors by name: ordinary ones, equal on all ranks, and DistTensors.
  void add_tensors(const std::map<std::string, at::Tensor>& tensors);
  /// Adds tensors that belong to this rank alone, as `GROUP/NAME`.
  void add_rank_state(const std::string& group, const std::map<std::string, at::Tensor>& tensors);
  /// Adds the records of tensors that are stored already.
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

}  // namespace tessera
