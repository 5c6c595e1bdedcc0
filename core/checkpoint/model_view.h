#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>
#include <tessera/comm/process_group.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/sharded_optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/region.h"
#include "engine/model/sharded_state.h"
#include "engine/unit/least_loaded.h"
#include "tensor/dist_meta.h"

namespace tessera {

struct AveragedWeights;

/// The tag of the collectives of saves and loads.
constexpr CollectiveTag kCheckpointTag{"checkpoint", Channel::kControl};

/// The group of a rank's own tensors with the momentum of its parts, for `ShardPlan::outer`.
constexpr const char* kOuterMomentum = "outer_momentum";

/// Returns this rank's part of a DistTensor of these global sizes, in the order of its local part;
/// an empty region without a box if it has none. Throws `c10::NotImplementedError`, naming `name`,
/// for placements that are `Partial`: the terms are not the tensor's values.
Region part_of(const DistSpec& spec, at::IntArrayRef global_sizes, const std::string& name);

/// Lets ranks that have the same values take turns in storing them, to balance the bytes that each
/// stores. All ranks must ask for the same tensors in the same order.
class ReplicaTurns {
 public:
  /// Returns the one of `replicas` equal ranks that stores the next `nbytes`.
  int64_t next(int64_t replicas, int64_t nbytes);

 private:
  std::map<int64_t, LeastLoaded> stored_;  // bytes, by the number of replicas
};

/// The index of this rank among the ranks with equal parts, and their number, along the mesh dims
/// in which a DistTensor is replicated.
struct Replica {
  int64_t index = 0, count = 1;
};
Replica replica_of(const DistSpec& spec);

/// A distinct parameter, and the part of it that this process has. Elements are counted in the
/// order of the parameter's memory (see `strides`); for a DistTensor, row by row in `box`.
struct ParamView {
  std::vector<std::string> names;       ///< several if it is tied
  std::vector<int64_t> sizes, strides;  ///< global
  std::optional<Box> box = std::nullopt;
  at::ScalarType dtype = at::kFloat;         ///< in use
  at::ScalarType master_dtype = at::kFloat;  ///< of `values`
  bool is_rounded = false;                   ///< those in use are `values`, rounded
  int64_t begin = 0, end = 0;                ///< elements that this process has
  at::Tensor
      values;  ///< those elements, as the optimizer updates them; undefined if there are none
  int64_t stored_begin = 0, stored_end = 0;  ///< the part of them that it stores in a checkpoint
  /// Each rank has its own values, as for a buffer; rank 0's belong to the model.
  bool is_rank_own = false;
  std::vector<at::Tensor> tensors = {};  ///< the user's, unless they show a unit

  const std::string& name() const { return names.front(); }
  int64_t numel() const { return c10::multiply_integers(sizes); }  ///< of all ranks
  Region region() const { return {begin, end, box}; }
  Region stored() const { return {stored_begin, stored_end, box}; }
};

/// Returns the view whose elements are the blocks of a parameter that have a scale each, without
/// values. A block belongs to its first element.
ParamView view_of_scales(const ParamView& param);

/// A parameter of the optimizer.
struct OptimizedParam {
  size_t param = 0;  ///< index into `ModelView::params`
  size_t param_group = 0;
  at::Tensor tensor;  ///< the optimizer's, of the elements that this process has; undefined if none
};

/// A model and its optimizer as checkpoints see them, whether sharded or not.
struct ModelView {
  std::vector<ParamView> params;
  std::vector<NamedTensor> buffers;  ///< ordinary tensors, whole in every process, and DistTensors
  std::set<std::string> left_out = {};  ///< buffers that are not saved; a file may have them
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

/// Views an average of a sharded model's parameters, with the model's buffers. The average must be
/// prepared.
ModelView view_of(const AveragedWeights& average);

/// Returns the parameters that the plan ignores. Other plans, and models that are not sharded, have
/// them among their parameters, and so do checkpoints.
std::vector<ParamSlot> ignored_slots(const ShardedState& state);

/// Return the records for the index, without chunks. A parameter has the optimizer's dtype.
TensorRecord record_of(const ParamView& param, std::string kind = "param");
TensorRecord record_of(const NamedTensor& buffer);

}  // namespace tessera
