#pragma once

#include <tessera/export.h>
#include <tessera/fully_shard.h>
#include <tessera/sharded_optimizer.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace tessera {

class GradScaler;

/// A learning rate scheduler of LibTorch's, or one derived from `LRScheduler`, of which the number
/// of steps is kept.
using SchedulerPtr =
    std::variant<torch::optim::LRScheduler*, torch::optim::ReduceLROnPlateauScheduler*>;

/// What a checkpoint holds besides the model and its optimizer, and how it is stored.
struct SaveOptions {
  /// The caller's own (the step, say), the same on all ranks; loading returns rank 0's.
  std::map<std::string, double> numbers = {};

  /// Stores each parameter in one piece, with its plain name and shape, in safetensors files that
  /// other tools open as a state dict. Units are gathered for it, one after another. false: each
  /// rank stores its shards as they lie, and nothing is gathered.
  bool whole_parameters = false;

  /// Saved along.
  const GradScaler* scaler = nullptr;
  std::vector<SchedulerPtr> schedulers = {};

  /// What each rank has for itself, by name: the position of its sampler
  /// (`tessera/resumable_sampler.h`), say. Ordinary tensors; small, as each rank stores its own.
  std::map<std::string, at::Tensor> rank_state = {};

  /// The state of the generator that the rank draws from when it names none
  /// (`default_generator()`), and of the current CUDA device's.
  bool random_state = true;

  /// When the checkpoint is in its place, removes the oldest ones beside it, so that this many are
  /// left: directories whose names differ from `path`'s in the number at the end (`step-100`), of
  /// which a lower one is older. Higher ones don't count, nor does what was saved without
  /// `keep_last`, renamed, or made by another tool: it stays. 0, or no number: none is removed.
  int keep_last = 0;
};

struct LoadOptions {
  /// Loaded along. What the checkpoint has of them is left out if they are not given; one that the
  /// checkpoint lacks is an error.
  GradScaler* scaler = nullptr;
  std::vector<SchedulerPtr> schedulers = {};

  /// Sets the generators as they were saved on this rank. Where a job of fewer ranks was saved, the
  /// others' stay as they are.
  bool random_state = true;

  /// Parameters and buffers that the checkpoint lacks stay as they are, with their optimizer state;
  /// what the model or the optimizer does not have is left out. Both are listed in the result.
  bool allow_missing = false;
  bool allow_unexpected = false;
};

/// What came with a checkpoint that was loaded.
struct LoadedCheckpoint {
  std::map<std::string, double> numbers;
  /// `SaveOptions::rank_state` of this rank; empty where a job of fewer ranks was saved.
  std::map<std::string, at::Tensor> rank_state;
  /// What `LoadOptions` allowed to differ: names of parameters and buffers, and for parameters of
  /// which the checkpoint has no optimizer state, "optimizer: NAME".
  std::vector<std::string> missing, unexpected;
};

/// Writes the model, its buffers and the optimizer's state and options into the directory `path`.
///
/// Collective over all ranks that train the model, with the same options. `optimizer` may be null.
/// Each rank writes its own files in the safetensors format, every value once; rank 0 adds an index
/// (JSON) and renames the finished directory to `path`, so that a reader sees the old checkpoint or
/// the new one, never a part. (A mount point can't be replaced: there it is `path`/checkpoint,
/// which is read by the name `path`, too.) Returns when everything is on the disk.
/// **Memory**: none, or that of one gathered unit if `options.whole_parameters`.
/// **Throws** on every rank, and leaves the old checkpoint, if a file can't be written on any, or
/// if another job is saving to `path`.
///
///     save_checkpoint("runs/one", sharded, &optimizer, {.numbers = {{"step", 100}}});
TESSERA_API void save_checkpoint(const std::filesystem::path& path, const ShardedModule& module,
                                 const ShardedOptimizer* optimizer,
                                 const SaveOptions& options = {});

/// The same of a module that is not sharded, whose parameters and buffers are DistTensors or the
/// same on all ranks. Collective over this thread's default world; in a program without ranks, of
/// one process. Throws `c10::NotImplementedError` for parameters that are `Partial`, and for
/// `options.whole_parameters` if there are DistTensors.
TESSERA_API void save_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                                 torch::optim::Optimizer* optimizer,
                                 const SaveOptions& options = {});

/// Reads a checkpoint into a sharded model, at any number of ranks, level and partition.
/// Collective.
///
/// `optimizer` may be null. Values are converted between float and half precisions where the model
/// has another of these dtypes. Each rank reads the blocks that its own shards need, and compares
/// their checksums.
/// **Throws** on every rank `c10::ValueError` that lists what is missing, not expected or of
/// another shape; the model is then unchanged. So it is if a file is missing, cut off or of another
/// save. Where stored bytes have changed, which only reading shows, all ranks throw, but values
/// that were read before are set.
TESSERA_API LoadedCheckpoint load_checkpoint(const std::filesystem::path& path,
                                             ShardedModule& module, ShardedOptimizer* optimizer,
                                             const LoadOptions& options = {});

/// Reads a checkpoint into a module and an optimizer that are not sharded: in a program without
/// ranks, on each rank before `fully_shard`, or with parameters that are DistTensors. Every process
/// reads what it needs by itself, and none waits for another.
///
///     load_checkpoint("runs/one", *net, &adamw);
///
/// Of parameters in half precision, the master weights are lost: load after `fully_shard` to go on
/// with the same bits. Throws as above; also throws `c10::ValueError` if the module is sharded.
TESSERA_API LoadedCheckpoint load_checkpoint(const std::filesystem::path& path,
                                             torch::nn::Module& module,
                                             torch::optim::Optimizer* optimizer,
                                             const LoadOptions& options = {});

/// The checkpoint in `directory` whose name ends with the highest number (`step-100`), whatever is
/// before it; none if there is none. Where a job saves meanwhile, ranks may find different ones:
/// ask before training.
TESSERA_API std::optional<std::filesystem::path> latest_checkpoint(
    const std::filesystem::path& directory);

/// Tensors by name: DistTensors, and ordinary ones, which are the same on all ranks.
using StateDict = std::map<std::string, at::Tensor>;

/// Writes tensors into the directory `path`, as above. Collective over this thread's default world.
/// Throws `c10::ValueError` on every rank if ranks have other names, naming them and the ranks.
TESSERA_API void save_state_dict(const std::filesystem::path& path, const StateDict& state);

/// Reads tensors of a checkpoint into those of `state`, in place, wherever and however they were
/// saved: by `save_state_dict`, or as parameters or buffers of a model. Collective, as above.
///
/// What a checkpoint has in several dtypes is read as the model used it, not from master weights.
/// Names that the checkpoint lacks are left alone, with a warning that lists them (their values are
/// not touched); what it has besides is left out. Returns those names. Throws `c10::ValueError` on
/// every rank, and changes nothing, for other shapes and for what can't be converted.
TESSERA_API std::vector<std::string> load_state_dict(const std::filesystem::path& path,
                                                     const StateDict& state);

/// One dict of several: `{"model", {{"weight", w}}}` becomes `model.weight`. Throws
/// `c10::ValueError` for names that become the same.
TESSERA_API StateDict flatten_state_dict(const std::map<std::string, StateDict>& parts);

}  // namespace tessera
