#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <tessera/comm/process_group.h>
#include <tessera/engine/outer_step.h>
#include <tessera/engine/plan_rules.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// The data that is split over the ranks. Each level includes those before it.
enum class ShardLevel : uint8_t {
  kNone,            ///< nothing: plain data parallel, gradients are averaged
  kOptimizerState,  ///< ZeRO 1. Whole gradients are freed once reduced, as at `kGradients`
  kGradients,       ///< ZeRO 2
  kParameters,      ///< ZeRO 3: parameters are gathered unit by unit, on first use
};

/// How a unit is split over the ranks.
enum class Partition : uint8_t {
  kFlatEven,    ///< parameters are packed into one flat buffer, cut into equal shards
  kWholeParam,  ///< each parameter is owned by one rank, that with the fewest elements so far
};

/// Source of the parameters' values at wrap time; ranks may have made different ones.
enum class StartValues : uint8_t {
  kBroadcast,  ///< rank 0's values are sent to all ranks
  kKeep,       ///< the caller guarantees that they are equal; nothing is sent
};

/// Dtypes in which a model is kept, computed with and reduced. Applies to floating dtypes only.
struct Precision {
  /// Dtype in which parameters are gathered and used; none: the one in which they were made. The
  /// optimizer updates the values in the original dtype: these are the master weights.
  std::optional<at::ScalarType> param_dtype = std::nullopt;

  /// Dtype of the master weights of trainable parameters whose dtype is narrower: copies of this
  /// rank's part. The optimizer updates them, and after each step the parameters are rounded from
  /// them. kFloat for bfloat16 or half models; none: the optimizer updates the original dtype.
  std::optional<at::ScalarType> master_dtype = std::nullopt;

  /// With a `param_dtype` narrower than the parameters: those that are frozen when the model is
  /// sharded keep nothing but their rounded values, 2 bytes an element for bfloat16 in place of 6.
  /// Checkpoints have these values then, and a master copy starts from them when a parameter is
  /// trained later. False: frozen parameters keep their original values, too.
  bool round_frozen = false;

  /// Dtype in which gradients are sent; none: the parameter's. Sums over ranks are taken in float
  /// or wider, and stored in the dtype that the optimizer updates.
  ///
  /// kChar (int8) or kFloat8_e4m3fn: blocks of 256 elements are sent with a scale in a quarter of
  /// float's bytes, as in ZeRO++'s qgZ (arXiv 2306.10209). Each rank sends its gradients, or the
  /// sums of a host whose ranks share memory, once; sums are taken in float. For parameters of
  /// float or bfloat16 over connections of messages in host memory; not with `replicate_group`,
  /// unless `outer` is set, whose averages have a dtype of their own.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;

  /// With a `reduce_dtype` of 8 bits: what rounding has lost of a gradient is added to the next one
  /// before it is sent. Keeps a float for each element that this rank sends; it is not part of
  /// checkpoints. Not with `bucket_bytes`, by which different units may share messages.
  bool error_feedback = true;

  /// Dtype in which updated parameters are sent, narrower than the one in which they are used;
  /// none: that one. All ranks, the owner included, then use the rounded values; the owner also
  /// keeps the unrounded values, and updates them as master weights. No effect on parameters that
  /// are used in a dtype as narrow.
  ///
  /// kChar (int8) or kFloat8_e4m3fn: blocks of 256 elements with a scale, as for `reduce_dtype`
  /// (qwZ of ZeRO++). No effect at `ShardLevel::kNone`, where parameters are not sent.
  std::optional<at::ScalarType> gather_dtype = std::nullopt;

  /// Units that are resharded between uses and have master weights keep no shard besides them: each
  /// gather rounds it from the master weights. Saves the shard's bytes, at the price of rounding
  /// twice a step. No effect on units that stay whole, nor where ranks share memory: there the
  /// shard is a part of the buffer that all ranks read.
  bool master_only = false;

  /// Dtype to which buffers are converted at wrap time; none: they are not converted.
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;

  /// With `param_dtype`: also converts the floating tensors that are passed to a forward through
  /// the wrapper.
  bool cast_inputs = true;
};

/// Location of the optimizer's state and of the values that the optimizer updates (the shards, or
/// the master weights).
enum class Offload : uint8_t {
  kNone,       ///< on the parameters' device
  kHost,       ///< in host memory, where the optimizer then steps
  kDirectory,  ///< in unnamed files mapped into memory; they disappear with the process
};

/// Describes how a model is sharded. Every dialect translates its arguments into a plan.
struct ShardPlan {
  ShardLevel level = ShardLevel::kParameters;
  Partition partition = Partition::kFlatEven;

  /// Parameters are packed into units of about this many bytes, in registration order. A larger
  /// parameter makes a unit of its own, together with the parameters after it in its module if
  /// these are tiny (1/64 of this in all). 0: one unit per parameter. None: chosen by the
  /// transport, 4 MiB where units are sent in messages, 1 MiB where ranks share memory.
  std::optional<int64_t> unit_bytes = std::nullopt;

  /// Where parameters may be cut, for optimizers that need more than single elements: the first
  /// rule that fits counts, and `partition` for parameters that no rule fits. A unit may have
  /// parameters of all kinds; with whole ones, its shards differ in size. Owners of whole
  /// parameters are those with the least work in their update so far: for matrices of m rows and n
  /// columns, elements times min(m, n), as in products with their transposes. For a DistTensor it
  /// is this rank's local part that is cut or whole.
  ///
  /// Throws for a rule that fits no parameter, a block larger than the parameter that a rule names,
  /// and rows that do not lie one after another in memory.
  std::vector<CutRule> cuts;

  /// The owners of these whole parameters, by name, as ranks in `process_group`. Other whole
  /// parameters go to the least loaded ranks, as without this list. Refused for parameters that may
  /// be cut.
  std::map<std::string, int> owners;

  /// Names of parameters that are left alone: never sharded, reduced or gathered. Rank 0's values
  /// are taken at wrap time if `start_values` says so.
  std::vector<std::string> ignored;

  /// Names of parameters that are each rank's own, such as experts that ranks do not share: whole
  /// on the rank, never sent, and updated by its own gradients: these are neither reduced nor
  /// averaged. Names and shapes must be equal on all ranks. Not with `replicate_group` or
  /// `mesh_dim`; checkpoints and `full_state_dict()` refuse such models.
  std::vector<std::string> unreplicated;

  /// Parameters that are sharded, and whose gradients are summed, over process groups of their own;
  /// the first rule that fits counts. Their gradients are scaled like all others: with `average`,
  /// by one over all the ranks that train the model. For each rule, the ranks that train the model
  /// must form process groups of one size. Clipping counts the parameters of every process group
  /// once.
  ///
  /// Parameters that are different in each process group should be DistTensors on a mesh of the
  /// ranks that hold the parts (`Shard(0)` for stacked experts), of which each rank of a process
  /// group has the same part: checkpoints and `full_state()` then have the whole, once, and load at
  /// other numbers of ranks. Ordinary tensors are this rank's process group's own:
  /// `full_state()` has those, and checkpoints are refused. Not with `outer`, `mesh_dim` or
  /// `join()`, nor with other DistTensors.
  std::vector<GroupRule> groups;

  /// The user's own units, each a list of parameter names; other parameters are packed by size.
  std::vector<std::vector<std::string>> units;

  /// At `kParameters`: parameters of at most this many elements stay whole (unsharded) on all
  /// ranks; their gradients and optimizer state are still sharded. 0: all are sharded.
  int64_t whole_numel = 0;

  /// At `kParameters`: names of further parameters that stay whole.
  std::vector<std::string> whole;

  /// At `kParameters`: maximum number of bytes of unsharded parameters that stay in memory between
  /// two uses, over all units; the unit in use and those being prefetched are always kept. The unit
  /// whose next use is farthest is resharded first. -1: none is resharded before the step.
  int64_t resident_bytes = 0;

  /// Maximum number of bytes that this rank may use for parameters, gradients, optimizer state and
  /// activations together, on the model's device. The first step runs with `resident_bytes` 0 and
  /// is measured; from the next step on, as many units stay unsharded as fit on every rank. If
  /// those of `prefetch` do not fit, fewer are gathered ahead; if not even one fits, the first step
  /// throws on every rank. Memory that the process uses for other purposes, or had before the model
  /// was sharded, is not counted. Ranks may have different budgets. None: `resident_bytes` decides.
  std::optional<int64_t> memory_budget = std::nullopt;

  /// Number of units that are gathered in the background ahead of use. 0: gather when used. With 2,
  /// one is on the link and the next one waits for its turn; more gained 2 % of a step at most
  /// (docs/design/residency.md). With a `memory_budget`, fewer if there is no room for so many.
  int prefetch = 2;

  /// True: reduced gradients are the mean over ranks; false: the sum.
  bool average = true;

  /// Gradients are divided by this before they are sent, and their sum over ranks by the rest of
  /// the factor (with `average`: by ranks / predivide; without: it is multiplied by this again).
  /// Keeps gradients that are sent in half precision within its range. Powers of two do not change
  /// any bit of values that neither overflow nor underflow.
  double predivide = 1;

  /// Gradients of units that are consecutive in the order of reductions, and have the same dtypes
  /// and device, are reduced in one collective of at most this many bytes, counted in whole
  /// gradients of the dtype that is sent. A larger unit is reduced alone. 0: one collective per
  /// unit.
  int64_t bucket_bytes = 0;

  /// False: gradients stay in `.grad`, whole, as autograd made them, and a step reads those of the
  /// parameters that its rank owns. The training program must make them equal on all ranks, say by
  /// an all-reduce. Only for levels below `kGradients`.
  bool reduce_gradients = true;

  /// Device to which parameters and buffers are moved at wrap time; none: they are not moved.
  std::optional<c10::Device> device = std::nullopt;

  StartValues start_values = StartValues::kBroadcast;

  /// Broadcasts the buffers (running statistics) from rank 0 at the start of every forward that
  /// goes through the wrapper.
  bool sync_buffers = false;

  /// The ranks to shard over; null: `default_process_group()`.
  ProcessGroupPtr process_group;

  /// The ranks that hold the same shard as this one (hybrid sharding): gradients are reduced over
  /// `process_group`, then over this group. Null: shards are not replicated. All ranks of this
  /// group must have the same rank number in their `process_group`s.
  ProcessGroupPtr replicate_group;

  /// With `replicate_group`: gradients are reduced over `process_group` alone, each replica steps
  /// its own optimizer, whose state stays its own, and replicas exchange nothing in a step but
  /// every `outer->every` steps: see `OuterStep`. Clipping and skipped steps are each replica's
  /// own, too; a step that a `GradScaler` skips counts. All replicas must make the same number of
  /// steps. Buffers are not averaged. None: gradients are summed over replicas in every backward.
  std::optional<OuterStep> outer = std::nullopt;

  /// For parameters that are DistTensors on one mesh: the dim of it to shard over, along which all
  /// are replicated, instead of `process_group`. A negative one counts from the end. Gradients are
  /// then those of one loss of the whole mesh, as without sharding; `average` has no effect. None:
  /// each rank of `process_group` has DistTensors on a mesh of its own.
  std::optional<int64_t> mesh_dim = std::nullopt;

  Precision precision;

  Offload offload = Offload::kNone;

  /// For `Offload::kDirectory`: the directory of the files, created if needed. Refused with other
  /// values of `offload`.
  std::string offload_directory;
};

}  // namespace tessera
