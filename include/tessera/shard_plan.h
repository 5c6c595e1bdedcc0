#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <tessera/process_group.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// What is split over the ranks. Each level includes those before it.
enum class ShardLevel : uint8_t {
  kNone,            ///< nothing: plain data parallel, gradients are averaged
  kOptimizerState,  ///< ZeRO 1. Whole gradients are freed as they are reduced, as at `kGradients`
  kGradients,       ///< ZeRO 2
  kParameters,      ///< ZeRO 3: parameters are gathered unit by unit, on first use
};

/// How a unit is split over the ranks.
enum class Partition : uint8_t {
  kFlatEven,    ///< parameters lie in one flat buffer, cut into equal shards
  kWholeParam,  ///< each parameter belongs to one rank, the least loaded one so far
};

/// What happens at wrap time to parameters that may differ between ranks.
enum class StartValues : uint8_t {
  kBroadcast,  ///< rank 0's values are taken
  kKeep,       ///< the caller guarantees that they agree; nothing is sent
};

/// In which dtypes a model is kept, computed with and reduced. Concerns floating dtypes only.
struct Precision {
  /// Parameters are gathered and used in this dtype; none: in the one they were made with. The
  /// optimizer goes on with the values they were made with: those are the master weights.
  std::optional<at::ScalarType> param_dtype = std::nullopt;

  /// Trainable parameters of a narrower dtype get master weights of this one: copies of this rank's
  /// part, which the optimizer updates and from which the parameters are rounded after each step.
  /// kFloat for bfloat16 or half models; none: the optimizer updates the dtype they were made with.
  std::optional<at::ScalarType> master_dtype = std::nullopt;

  /// Gradients are sent in this dtype; none: in the parameter's. Sums over ranks are taken in float
  /// at least and stored in the dtype that the optimizer updates.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;

  /// Updated parameters travel in this dtype, narrower than the one they are used in; none: in that
  /// one. All ranks then use the rounded values, their owner, too, which keeps the values that it
  /// updates beside them: those are the master weights. Parameters that are used in a dtype as
  /// narrow are left as they are.
  std::optional<at::ScalarType> gather_dtype = std::nullopt;

  /// Units that are freed between uses and have master weights keep no shard beside them: it is
  /// rounded from the masters for each gather. Saves the shard's bytes, at the price of rounding
  /// twice a step. No effect on units that stay whole, and where ranks share memory: there the
  /// shard lies in what all see.
  bool master_only = false;

  /// Buffers are converted to this dtype at wrap; none: they stay as they are.
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;

  /// With `param_dtype`: floating tensors given to a forward through the wrapper are converted to
  /// it, too.
  bool cast_inputs = true;
};

/// Where the optimizer's state lies, and what the optimizer updates (the shards, or the master
/// weights).
enum class Offload : uint8_t {
  kNone,       ///< on the parameters' device
  kHost,       ///< in host memory, where the optimizer then steps
  kDirectory,  ///< in files that are mapped into memory; they have no names and go with the process
};

/// Says how a model is sharded. Every dialect translates its arguments into one of these.
struct ShardPlan {
  ShardLevel level = ShardLevel::kParameters;
  Partition partition = Partition::kFlatEven;

  /// Parameters are packed into units of about this many bytes, in registration order. A larger
  /// parameter makes a unit of its own; what its module has after it and is tiny (1/64 of this)
  /// goes with it. 0: one unit per parameter. None: as suits the transport, 10 MiB where units
  /// travel in messages, 1 MiB where ranks share memory.
  std::optional<int64_t> unit_bytes = std::nullopt;

  /// With `Partition::kWholeParam`: the owners of these parameters, by name, as ranks in
  /// `process_group`. The others go to the least loaded, as if there were no such list. With
  /// `kFlatEven` refused.
  std::map<std::string, int> owners;

  /// The parameters of these names are left alone: never cut, reduced or gathered. Rank 0's values
  /// are taken at wrap if `start_values` says so.
  std::vector<std::string> ignored;

  /// The parameters of these names are each rank's own, as experts are that ranks do not share:
  /// whole on the rank, never sent, and updated by its own gradients, which are neither reduced nor
  /// averaged. Names and shapes are the same on all ranks. Not with `replicate_group` or
  /// `mesh_dim`; checkpoints and `full_state_dict()` refuse such models.
  std::vector<std::string> unreplicated;

  /// The user's own units, each a list of parameter names; parameters in none are packed by size.
  std::vector<std::vector<std::string>> units;

  /// At `kParameters`: parameters of at most this many elements stay whole on all ranks (their
  /// gradients and optimizer state are sharded all the same). 0: all are sharded.
  int64_t whole_numel = 0;

  /// At `kParameters`: the parameters of these names stay whole, too.
  std::vector<std::string> whole;

  /// At `kParameters`: bytes of unsharded parameters that may stay in memory between two uses,
  /// counted over all units; the one in use and those being prefetched are always kept. The unit
  /// whose next use is farthest goes first. -1: never free any before the step.
  int64_t resident_bytes = 0;

  /// Bytes that this rank may have of parameters, gradients, optimizer state and activations
  /// together, on the model's device. The first step runs with `resident_bytes` 0 and is measured;
  /// from the next one on, as many units stay gathered as fit on every rank. That step throws on
  /// every rank if not even one does. Memory that the process takes for other things, or had before
  /// the model was sharded, is not counted. Ranks may have different budgets. None:
  /// `resident_bytes` says what stays.
  std::optional<int64_t> memory_budget = std::nullopt;

  /// How many units ahead of use are gathered in the background. 0: gather when used.
  int prefetch = 1;

  /// Reduced gradients are the mean over ranks; false: the sum.
  bool average = true;

  /// Gradients are divided by this before they are sent, and their sum over ranks by what is left
  /// (with `average`: by ranks / predivide; without: it is multiplied by this again). Keeps
  /// gradients that are sent in half precision in its range. Powers of two change no bit of what
  /// neither overflows nor underflows.
  double predivide = 1;

  /// The gradients of units that follow one another in the order of reductions, and have the same
  /// dtypes and device, are reduced in one collective of at most this many bytes, counted in whole
  /// gradients of the dtype that is sent. A larger unit goes alone. 0: each unit by itself.
  int64_t bucket_bytes = 0;

  /// False: gradients stay in `.grad`, whole, as autograd made them, and a step reads those of what
  /// its rank owns. Who trains makes them equal on all ranks, say by an all-reduce. Only for
  /// levels below `kGradients`.
  bool reduce_gradients = true;

  /// Parameters and buffers are moved there at wrap; none: they stay where they were made.
  std::optional<c10::Device> device = std::nullopt;

  StartValues start_values = StartValues::kBroadcast;

  /// Broadcast the buffers (running statistics) from rank 0 at the start of every forward that goes
  /// through the wrapper.
  bool sync_buffers = false;

  /// The ranks to shard over; null: `default_process_group()`.
  ProcessGroupPtr process_group;

  /// The ranks that hold the same shard as this one (hybrid sharding): gradients are reduced over
  /// `process_group`, then over these. Null: shards are not replicated. All ranks of it have one
  /// rank in their `process_group`s.
  ProcessGroupPtr replicate_group;

  /// For parameters that are DistTensors on one mesh: shard them over this dim of it, along which
  /// all are replicated, in place of `process_group`. A negative one counts from the end. Gradients
  /// are then those of one loss that the mesh has together, as without sharding; `average` has no
  /// say. Without this, each rank of `process_group` has DistTensors on a mesh of its own.
  std::optional<int64_t> mesh_dim = std::nullopt;

  Precision precision;

  Offload offload = Offload::kNone;

  /// For `Offload::kDirectory`: where the files are made; it is created if need be. Refused with
  /// others.
  std::string offload_directory;
};

}  // namespace tessera
