#pragma once

#include <tessera/engine/fully_shard.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/export.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace tessera {

class ExponentialAverage;
class GradScaler;
struct AveragedWeights;

/// A learning rate scheduler of LibTorch, or one derived from `LRScheduler`, whose number of steps
/// is stored.
using SchedulerPtr =
    std::variant<torch::optim::LRScheduler*, torch::optim::ReduceLROnPlateauScheduler*>;

/// The best of several checkpoints is that with the lowest, or the highest, value of a number in
/// `SaveOptions::numbers`; of equal ones, the first.
struct BestBy {
  std::string number;
  bool highest = false;
};

/// The contents of a checkpoint besides the model and its optimizer, and the storage format.
struct SaveOptions {
  /// The caller's own numbers (the step, say) and texts (a configuration, say, also as JSON), equal
  /// on all ranks; loading returns rank 0's.
  std::map<std::string, double> numbers = {};
  std::map<std::string, std::string> texts = {};

  /// Stores each parameter in one piece, with its plain name and shape, in safetensors files that
  /// other tools open as a state dict. Gathers the units for this, one after another. False: each
  /// rank stores its own shards, and nothing is gathered.
  bool whole_parameters = false;

  /// Also saved, if given.
  const GradScaler* scaler = nullptr;
  std::vector<SchedulerPtr> schedulers = {};

  /// State of this rank alone, by name, such as the position of its sampler
  /// (`tessera/loop/resumable_sampler.h`). Ordinary tensors; keep them small, as each rank stores
  /// its own.
  std::map<std::string, at::Tensor> rank_state = {};

  /// Saves the state of the rank's default generator (`default_generator()`) and of the current
  /// CUDA device's generator.
  bool random_state = true;

  /// Number of checkpoints to keep in the series of `path`, the new one included. A series is the
  /// directories beside `path` whose names differ only in the number at the end (`step-100`). Once
  /// the new checkpoint is in its place, the ones with the lowest numbers are removed. Not counted
  /// and never removed: checkpoints with higher numbers than the new one, and those that were saved
  /// without `keep_last`, renamed, or made by another tool. 0, or no number in `path`: none is
  /// removed.
  int keep_last = 0;

  /// With `keep_last`: the best checkpoint of the series is kept, too, even if it is older than
  /// those. Its number must be in `numbers`; one that is NaN is never the best.
  std::optional<BestBy> keep_best = std::nullopt;
};

struct LoadOptions {
  /// Also restored. Null or empty: saved state is ignored. If one is given whose state the
  /// checkpoint lacks, the load throws.
  GradScaler* scaler = nullptr;
  std::vector<SchedulerPtr> schedulers = {};

  /// Sets the generators to the state that the rank of this number saved. If fewer ranks saved, the
  /// generators of the others are not changed.
  bool random_state = true;

  /// `allow_missing`: parameters and buffers that the checkpoint lacks keep their values and
  /// optimizer state. `allow_unexpected`: entries that the model or the optimizer does not have are
  /// ignored. The result lists both.
  bool allow_missing = false;
  bool allow_unexpected = false;
};

/// Values from a loaded checkpoint for the caller.
struct LoadedCheckpoint {
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> texts;
  /// `SaveOptions::rank_state` of the rank of this number; empty if fewer ranks saved.
  std::map<std::string, at::Tensor> rank_state;
  /// Differences that `LoadOptions` allowed: names of parameters and buffers, and "optimizer: NAME"
  /// for parameters whose optimizer state is missing or unexpected. With several models:
  /// "MODEL/NAME", and "MODEL" for one that is missing or unexpected itself.
  std::vector<std::string> missing, unexpected;
};

/// One of several models that are saved as one checkpoint.
struct TESSERA_API CheckpointModel {
  struct Sharded {
    ShardedModule module;
    ShardedOptimizer* optimizer;
  };
  struct Plain {
    torch::nn::Module* module;
    torch::optim::Optimizer* optimizer;
  };
  using Average = std::shared_ptr<AveragedWeights>;

  /// `name`: letters, digits, `-` and `_`. The optimizers may be null. An average is saved as the
  /// model with the averaged parameters and the model's buffers. All must live until the save or
  /// load has ended.
  CheckpointModel(std::string name, const ShardedModule& module,
                  ShardedOptimizer* optimizer = nullptr);
  CheckpointModel(std::string name, torch::nn::Module& module,
                  torch::optim::Optimizer* optimizer = nullptr);
  CheckpointModel(std::string name, const ExponentialAverage& average);

  std::string name;
  std::variant<Sharded, Plain, Average> model;
};

/// Writes the model, its buffers and the optimizer's state and options into the directory `path`.
///
/// Collective over all ranks that train the model, with the same options. `optimizer` may be null.
/// Each rank writes its own files in the safetensors format, and each value is stored once; rank 0
/// adds an index (JSON) and renames the finished directory to `path`, so that a reader sees either
/// the old checkpoint or the new one, never a part. (A mount point can't be replaced: the
/// checkpoint is then written to `path`/checkpoint, and is also read by the name `path`.) Returns
/// when everything is on the disk.
/// **Memory**: none; with `options.whole_parameters`, that of one gathered unit.
/// **Throws** on every rank, and keeps the old checkpoint, if any rank can't write a file, or if
/// another job is saving to `path`.
///
///     save_checkpoint("runs/one", sharded, &optimizer, {.numbers = {{"step", 100}}});
TESSERA_API void save_checkpoint(const std::filesystem::path& path, const ShardedModule& module,
                                 const ShardedOptimizer* optimizer,
                                 const SaveOptions& options = {});

/// Saves a module that is not sharded, whose parameters and buffers are DistTensors or equal on all
/// ranks. Collective over this thread's default world; without ranks, that is one process. Throws
/// `c10::NotImplementedError` for parameters that are `Partial`, and for `options.whole_parameters`
/// if there are DistTensors.
TESSERA_API void save_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                                 torch::optim::Optimizer* optimizer,
                                 const SaveOptions& options = {});

/// Saves several models with their optimizers, such as those of a GAN, or a model and its average:
/// all of them or, if a rank fails, none.
///
///     save_checkpoint("runs/gan/step-100",
///                     {{"generator", generator, &for_generator}, {"critic", critic, &for_critic}},
///                     {.numbers = {{"step", 100}}});
///
/// Each model becomes a checkpoint of its own in `path`/NAME, which other functions and
/// `tessera ckpt` can read; `options` is saved once, in `path`. Collective, with the same names in
/// the same order. **Throws** as above, and `c10::ValueError` on every rank for names that are
/// invalid or not distinct, and for models that are sharded over different ranks.
TESSERA_API void save_checkpoint(const std::filesystem::path& path,
                                 const std::vector<CheckpointModel>& models,
                                 const SaveOptions& options = {});

/// Reads a checkpoint into a sharded model, at any number of ranks, level and partition.
/// Collective.
///
/// `optimizer` may be null. Values are converted between float and half precisions if the model's
/// dtype differs. Each rank reads only the blocks that its own shards need, and verifies their
/// checksums.
/// **Throws** `c10::ValueError` on every rank, and leaves the model unchanged, if entries are
/// missing, unexpected or of another shape (the message lists them), and also if a file is missing,
/// truncated or from another save. Corrupt bytes are detected only when they are read: all ranks
/// then throw, but values that were read before have been set.
TESSERA_API LoadedCheckpoint load_checkpoint(const std::filesystem::path& path,
                                             ShardedModule& module, ShardedOptimizer* optimizer,
                                             const LoadOptions& options = {});

/// Reads a checkpoint into a module and an optimizer that are not sharded: in a program without
/// ranks, on each rank before `fully_shard`, or with parameters that are DistTensors. Each process
/// reads the values that it needs by itself, and waits for no other.
///
///     load_checkpoint("runs/one", *net, &adamw);
///
/// Does not restore the master weights of parameters in half precision: load after `fully_shard` to
/// resume with the same bits. Throws as above; also throws `c10::ValueError` if the module is
/// sharded.
TESSERA_API LoadedCheckpoint load_checkpoint(const std::filesystem::path& path,
                                             torch::nn::Module& module,
                                             torch::optim::Optimizer* optimizer,
                                             const LoadOptions& options = {});

/// Reads the models of a checkpoint that was saved with several. Collective over the ranks of the
/// first model. Nothing is changed before all of them are known to fit. Names of models that the
/// checkpoint lacks, or has besides, are refused like those of parameters.
TESSERA_API LoadedCheckpoint load_checkpoint(const std::filesystem::path& path,
                                             const std::vector<CheckpointModel>& models,
                                             const LoadOptions& options = {});

/// Returns the checkpoint in `directory` whose name ends with the highest number (`step-100`), with
/// any prefix; none if there is none. While a job is saving, ranks may find different ones: call
/// this before training.
TESSERA_API std::optional<std::filesystem::path> latest_checkpoint(
    const std::filesystem::path& directory);

/// Returns the best checkpoint in `directory` among those that have the number; none if there is
/// none. Reads the indices of all. As above, call it when no job saves there.
TESSERA_API std::optional<std::filesystem::path> best_checkpoint(
    const std::filesystem::path& directory, const BestBy& by);

/// Tensors by name: DistTensors, and ordinary tensors that are equal on all ranks.
using StateDict = std::map<std::string, at::Tensor>;

/// Writes tensors into the directory `path`, as `save_checkpoint()` does. Collective over this
/// thread's default world. Throws `c10::ValueError` on every rank if the names differ between
/// ranks, listing the names and the ranks.
TESSERA_API void save_state_dict(const std::filesystem::path& path, const StateDict& state);

/// Reads tensors of a checkpoint into those of `state`, in place. The placements may differ, and
/// the checkpoint may hold them from `save_state_dict`, or as parameters or buffers of a model.
/// Collective, as above.
///
/// A tensor that the checkpoint has in several dtypes is read as the model used it, not from master
/// weights. Tensors that the checkpoint lacks keep their values; a warning lists their names, and
/// they are returned. Other entries of the checkpoint are ignored. Throws `c10::ValueError` on
/// every rank, and changes nothing, if a shape differs or a dtype can't be converted.
TESSERA_API std::vector<std::string> load_state_dict(const std::filesystem::path& path,
                                                     const StateDict& state);

/// Flattens named dicts into one: `{"model", {{"weight", w}}}` becomes `model.weight`. Throws
/// `c10::ValueError` if two names become equal.
TESSERA_API StateDict flatten_state_dict(const std::map<std::string, StateDict>& parts);

}  // namespace tessera
