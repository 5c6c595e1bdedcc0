#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/base/memory_sample.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/shard_plan.h>
#include <tessera/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch {
namespace nn {
class Module;
}
namespace optim {
class Optimizer;
}
}  // namespace torch

namespace tessera {

/// A parameter's sizes, without its values.
struct ParameterSize {
  std::vector<std::string> names;  ///< several if it is tied
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  bool trainable = true;
};

/// Returns the distinct parameters of a model that is not sharded yet, in registration order.
TESSERA_API std::vector<ParameterSize> parameter_sizes(const torch::nn::Module& module);

/// Reads the sizes of a model's parameters, and no values. `path` is one of:
/// - a safetensors file, whose name ends in `.safetensors`,
/// - a directory: a checkpoint of Tessera's, or one with checkpoints, for the latest, or one with
///   safetensors files, chosen as `import_checkpoint()` does: by its index, or all of them,
/// - a `config.json` of Hugging Face's, an index of safetensors files in the same directory, or a
///   directory with a `config.json` and none of the safetensors files: see
///   `read_transformer_config()`,
/// - any other file: a list with a line for each parameter, `name dtype size...`, with ` frozen` at
///   the end if it is not trained. `#` begins a comment. It may be a pipe.
///
/// Files hold buffers like parameters: those of integers are returned as frozen parameters, the
/// others as trained ones. Tensors of a safetensors file are in the order of their bytes.
/// Throws `c10::ValueError` if `path` is none of these, or holds no parameter.
TESSERA_API std::vector<ParameterSize> read_parameter_sizes(const std::string& path);

/// Returns a made-up model: `numel` elements in `layers` parameters of equal size, to one element.
TESSERA_API std::vector<ParameterSize> made_up_parameter_sizes(int64_t numel, int layers,
                                                               at::ScalarType dtype);

/// Returns the dtype of a name such as `float32`, `fp32`, `F32`, `bfloat16`, `bf16` or `int64`.
/// Throws `c10::ValueError` for an unknown name.
TESSERA_API at::ScalarType parse_dtype(const std::string& name);

/// Returns how many tensors with a value for each element the optimizer keeps for each parameter: 2
/// for Adam and AdamW. Throws `c10::NotImplementedError` for an optimizer other than LibTorch's
/// Adagrad, Adam, AdamW, RMSprop and SGD, and CPUAdam, and `c10::ValueError` if its param groups
/// differ in this.
TESSERA_API int state_tensors_of(torch::optim::Optimizer& optimizer);

/// Returns the rules for a plan that `muon_cuts()` has for such parameters.
TESSERA_API std::vector<CutRule> muon_cuts(const std::vector<ParameterSize>& parameters,
                                           const std::vector<std::string>& exceptions);

/// A moment of forward or backward at which a rank may need the most memory.
struct ActivationMoment {
  std::string name;       ///< such as `backward of layer 3: feed-forward`
  bool backward = false;  ///< in backward, else in forward
  /// Names of the parameters that operators read, in the order of use.
  std::vector<std::string> parameters = {};
  /// Names of the parameters whose gradients are made.
  std::vector<std::string> gradients = {};
  /// Peak bytes of activations: tensors kept for backward so far, plus operator workspace.
  int64_t nbytes = 0;
};

/// The ranks and the optimizer for which a plan is evaluated.
struct PlanReportOptions {
  int ranks = 1;     ///< number of ranks that shard: the size of `ShardPlan::process_group`
  int replicas = 1;  ///< copies of each shard: the size of `ShardPlan::replicate_group`
  int rank = 0;      ///< the one of `ranks` to report on; its replicas are like it

  /// See `state_tensors_of()`. They are counted in the dtype that the optimizer updates. (Those of
  /// Adagrad have the dtype that the parameters have when it is constructed.)
  int state_tensors = 2;
  /// Their dtype, if it is another: `CPUAdamOptions::state_dtype`. Byte is for plans with
  /// `cpu_adam_cuts()`.
  std::optional<at::ScalarType> state_dtype = std::nullopt;
  /// Set: in place of them the state of `Muon`, with these exceptions of `muon_groups()`: a tensor
  /// for a matrix, two for other parameters, in float or wider. `plan.cuts` must have the rules.
  std::optional<std::vector<std::string>> muon = std::nullopt;

  /// Indices of the units in the order in which forward and backward use them. Both empty:
  /// registration order, and the reverse. A unit that backward does not read, such as the weights
  /// of a first layer, is used in forward only; trainable units in neither are inserted as the
  /// engine does.
  std::vector<int> forward_order, backward_order;

  /// True: all ranks are on one host, and share its memory (the arena). At all levels but `kNone`,
  /// each rank then counts only its shard of the parameters, of which all ranks share one copy that
  /// stays whole, and sends nothing.
  bool shares_memory = false;

  /// Bytes of activations at their peak, if they are known as one number: measured by
  /// `MemoryTracer::peak_other_bytes()`, say. They are then added to the peaks of everything else.
  int64_t activations = 0;
  /// Or the moments of a step in the order of time. They tell the order in which units are used,
  /// and exclude `forward_order` and `backward_order`.
  std::vector<ActivationMoment> moments;
};

/// A parameter that may not be cut anywhere.
struct PlannedCut {
  std::string name;
  Cut cut = Cut::kWhole;
  int64_t block = 1;  ///< elements that stay together where it may be cut
  int owner = -1;     ///< the rank of a whole one
  std::string text;   ///< of all this, as in `ShardedModule::describe()`
};

/// A unit's sizes, without its values.
struct PlannedUnit {
  std::string name;
  int64_t numel = 0;   ///< of its flat buffer, padding included
  int64_t nbytes = 0;  ///< of the full parameters
  ShardLevel level = ShardLevel::kParameters;
  bool trainable = true;
  std::vector<int64_t> shards;   ///< elements of each rank's part
  std::vector<PlannedCut> cuts;  ///< in the order in memory
};

/// Traffic of a rank in a step, by purpose. Bytes are those that a counting process group counts
/// where ranks send messages; in shared memory there are none.
struct TESSERA_API PlannedTraffic {
  using Entry = CollectiveCounts::Entry;
  Entry gather_forward;   ///< parameters, for forward (the first ones are sent in the step before)
  Entry gather_backward;  ///< parameters, for backward
  Entry gather_updated;   ///< parameters that stay whole between steps, after the step
  Entry reduce;           ///< gradients, over the ranks that shard; at `ShardLevel::kNone` also
                          ///< reduced ones, to all ranks, but for the next entry
  Entry gather_reduced;   ///< those of buckets, of replicas, and in messages of 8 bits
  Entry replicate;        ///< reduced gradients, over the replicas
  Entry agree, agree_replicas;  ///< which parameters were used, over the ranks and the replicas

  /// Totals over `ShardPlan::process_group` and over `ShardPlan::replicate_group`.
  CollectiveCounts over_ranks() const;
  CollectiveCounts over_replicas() const;
  int64_t bytes_sent() const;
};

/// Memory and traffic of one rank.
struct TESSERA_API PlannedRank {
  int rank = 0;
  /// The memory that `ShardedOptimizer::memory()` returns after a step, before `zero_grad()`.
  /// `peak_in_flight` is 0, as it depends on the speed of messages. `peak_unsharded` does not
  /// include the additional memory of an operator that uses parameters of several units at once.
  ShardMemory memory;
  PlannedTraffic traffic;

  /// What the rank holds when it needs the most memory in a step that begins with `zero_grad()` and
  /// has one backward; `other` are the activations. Counts one unit's whole gradients in flight
  /// besides those that are being made. Without `PlanReportOptions::moments` it is an upper bound:
  /// the sum of all peaks.
  MemoryBytes peak;
  std::string peak_at;  ///< the moment's name; empty without moments

  /// Returns the bytes of the peak on the rank's device: all but `peak.offloaded`.
  int64_t needed() const { return peak.total() - peak.offloaded; }
  /// Returns the bytes kept between steps: all of `memory` but the peaks.
  int64_t kept() const;
};

/// The cost of a plan. See `plan_report()`.
struct PlanReport {
  std::vector<PlannedUnit> units;
  size_t largest_unit = 0;  ///< index of the unit with the most bytes
  int64_t parameters = 0;   ///< elements, without padding
  PlannedRank rank;         ///< the rank `PlanReportOptions::rank`
  PlannedRank fullest;      ///< the rank that keeps the most, the lowest of equals
  PlannedRank busiest;      ///< the rank that sends the most, the lowest of equals; of more than 64
                            ///< with `Partition::kWholeParam`, the one of most parameters

  /// Bytes by the formulas of the ZeRO paper (Rajbhandari et al., 2020), with P bytes of
  /// parameters, G of gradients in their dtype, and K of optimizer state and master weights:
  /// P + G + K at `kNone`, P + G + K/N at `kOptimizerState`, P + (G + K)/N at `kGradients` and
  /// (P + G + K)/N at `kParameters`. Without padding.
  ///
  /// The engine differs in two points: it keeps reduced gradients in the dtype that the optimizer
  /// updates, and it keeps 1/N of them at `kOptimizerState`, too.
  double zero_paper_bytes = 0;
};

/// Computes the memory and the traffic of `plan` from sizes alone: makes no values, and contacts no
/// other rank.
///
/// Runs the engine for some steps with parameters that have no memory. So the figures are, to the
/// byte, those that a job measures in steady state: a step after the first ones, with one forward,
/// one backward in which each trainable parameter gets a gradient, and one optimizer step of all
/// trainable parameters; no clipping (16 bytes more are reduced), no activation checkpoints.
/// Buffers and ignored parameters are not counted. Ranks are taken to send messages, unless
/// `options.shares_memory`. `PlannedRank::peak` is an estimate.
///
/// `plan.process_group` and `replicate_group` are ignored: `options` takes their place. Throws
/// `c10::ValueError` as `fully_shard()` does, and for impossible ranks, replicas, state, orders or
/// activations, and `c10::NotImplementedError` for `mesh_dim`, `memory_budget`, `sync_buffers`,
/// `outer` and `reduce_gradients = false`.
TESSERA_API PlanReport plan_report(const std::vector<ParameterSize>& parameters,
                                   const ShardPlan& plan, const PlanReportOptions& options = {});

}  // namespace tessera
