#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/fully_shard.h>
#include <tessera/sharded_optimizer.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "model/sharded_state.h"

namespace tessera {

class ReplicaTurns;

/// A distinct parameter, and the part of it that this process has. Elements are counted in the
/// order of the parameter's memory, which `strides` describe; for a DistTensor, row by row in
/// `box`.
struct ParamView {
  std::vector<std::string> names;       ///< several if it is tied
  std::vector<int64_t> sizes, strides;  ///< global
  std::optional<Box> box = std::nullopt;
  at::ScalarType dtype = at::kFloat;         ///< in use
  at::ScalarType master_dtype = at::kFloat;  ///< of `values`
  int64_t begin = 0, end = 0;                ///< elements that this process has
  at::Tensor
      values;  ///< those elements, as the optimizer updates them; undefined if there are none
  int64_t stored_begin = 0, stored_end = 0;  ///< the part of them that it stores in a checkpoint
  /// Each rank has its own values, as for a buffer; rank 0's belong to the model.
  bool is_rank_own = false;

  const std::string& name() const { return names.front(); }
  Region region() const { return {begin, end, box}; }
  Region stored() const { return {stored_begin, stored_end, box}; }
};

/// A parameter of the optimizer.
struct OptimizedParam {
  size_t param = 0;  ///< index into `ModelView::params`
  size_t param_group = 0;
  at::Tensor tensor;  ///< the optimizer's, of the elements that this process has; undefined if none
};

/// A model and its optimizer as checkpoints see them, whether sharded or not.
struct ModelView {
  std::vector<ParamView> params;
  std::vector<NamedTensor> buffers;  ///< ordinary tensors, which every process has, and DistTensors
  torch::optim::Optimizer* optimizer = nullptr;
  std::vector<OptimizedParam> optimized;  ///< in the optimizer's order
};

/// Views a sharded model. Throws if `optimizer` (which may be null) belongs to another model, or if
/// parameters were taken out of their units.
ModelView view_of(const ShardedState& state, const ShardedOptimizer* optimizer);

/// Views a module that is not sharded, whose parameters may be DistTensors. Ranks that have the
/// same elements take turns in storing them; ordinary tensors are the same on all `ranks`, of which
/// this process is `rank`. `module` must outlive the view.
///
/// Throws `c10::ValueError` if `optimizer` (which may be null) has parameters that are not the
/// module's, or if the module is sharded.
ModelView view_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer, int rank = 0,
                  int ranks = 1);

/// Returns the parameters that the plan ignores. Other plans, and models that are not sharded, have
/// them among their parameters, and so do checkpoints.
std::vector<ParamSlot> ignored_slots(const ShardedState& state);

/// Views a parameter that this process has whole, or as a DistTensor. `turns` chooses which of
/// `ranks` equal ranks stores it.
ParamView view_of_whole(const ParamSlot& slot, int rank, int ranks, ReplicaTurns& turns);

/// Returns the strides of a contiguous tensor.
std::vector<int64_t> row_major(at::IntArrayRef sizes);

/// Return the records for the index, without chunks. A parameter has the optimizer's dtype.
TensorRecord record_of(const ParamView& param);
TensorRecord record_of(const NamedTensor& buffer);
/// Returns the record of a tensor whose elements are stored in its logical order.
TensorRecord contiguous_record(std::string kind, std::vector<std::string> names,
                               std::vector<int64_t> shape, at::ScalarType dtype);

}  // namespace tessera
