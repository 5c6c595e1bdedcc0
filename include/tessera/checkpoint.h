#pragma once

#include <tessera/export.h>
#include <tessera/fully_shard.h>
#include <tessera/sharded_optimizer.h>

#include <filesystem>
#include <map>
#include <string>

namespace tessera {

class GradScaler;

/// What a checkpoint holds besides the model, and how it is stored.
struct SaveOptions {
  /// The caller's own (the step, say); `load_checkpoint` returns them.
  std::map<std::string, double> numbers;

  /// Stores each parameter in one piece, with its plain name and shape, in safetensors files that
  /// other tools open as a state dict. Units are gathered for it, one after another. false: each
  /// rank stores its shards as they lie, and nothing is gathered.
  bool whole_parameters = false;

  /// Saved along.
  const GradScaler* scaler = nullptr;
};

/// Writes the model, its buffers and the optimizer's state and options into the directory `path`.
///
/// Collective. Each rank writes its own files in the safetensors format; rank 0 adds an index
/// (JSON) and renames the finished directory to `path`, so that a reader sees the old checkpoint or
/// the new one, never a part.
/// **Memory**: none, or that of one gathered unit if `options.whole_parameters`.
/// **Throws** on every rank, and leaves the old checkpoint, if a file can't be written on any.
///
///     save_checkpoint("runs/one", sharded, &optimizer, {.numbers = {{"step", 100}}});
TESSERA_API void save_checkpoint(const std::filesystem::path& path, const ShardedModule& module,
                                 const ShardedOptimizer* optimizer,
                                 const SaveOptions& options = {});

/// Reads a checkpoint into a sharded model, at any number of ranks, level and partition.
/// Collective.
///
/// Returns the caller's numbers. `optimizer` and `scaler` may be null; what the checkpoint has of
/// them is left out then. Values are converted between float and half precisions where the model
/// has another of these dtypes. Throws `c10::ValueError` on every rank, naming what is missing or
/// has another shape; the model is then unchanged.
TESSERA_API std::map<std::string, double> load_checkpoint(const std::filesystem::path& path,
                                                          ShardedModule& module,
                                                          ShardedOptimizer* optimizer,
                                                          GradScaler* scaler = nullptr);

/// Reads a checkpoint into a module and an optimizer that are not sharded: in a program without
/// ranks, or on each rank before `fully_shard`. Every process reads all of it by itself.
///
///     load_checkpoint("runs/one", *net, &adamw);
///
/// Of parameters in half precision, the master weights are lost: load after `fully_shard` to go on
/// with the same bits. Returns and throws as above; also throws `c10::ValueError` if the module is
/// sharded already.
TESSERA_API std::map<std::string, double> load_checkpoint(const std::filesystem::path& path,
                                                          torch::nn::Module& module,
                                                          torch::optim::Optimizer* optimizer,
                                                          GradScaler* scaler = nullptr);

}  // namespace tessera
