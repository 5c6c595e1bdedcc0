#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "checkpoint/index.h"
#include "tensor/shard_mesh.h"

namespace tessera {

/// The load of one model, or of the objects that are saved along with models. `plan()` comes first;
/// until `load()`, nothing is changed.
class ModelLoad {
 public:
  explicit ModelLoad(Ranks ranks) : ranks_(std::move(ranks)) {}
  virtual ~ModelLoad() = default;
  ModelLoad(const ModelLoad&) = delete;
  ModelLoad& operator=(const ModelLoad&) = delete;

  /// The ranks that load together.
  const Ranks& ranks() const { return ranks_; }

  /// Reads the index, and throws unless all can be loaded. Not collective. `options` must outlive
  /// this object.
  virtual void plan(const std::filesystem::path& path, const LoadOptions& options) = 0;
  /// The checkpoint's; after `plan()`.
  virtual const CheckpointIndex& index() const = 0;
  /// Collective; if a rank fails, all ranks throw.
  virtual LoadedCheckpoint load() = 0;

 private:
  Ranks ranks_;
};

/// Prepares a load. Collective for sharded models.
std::unique_ptr<ModelLoad> load_of(ShardedModule& module, ShardedOptimizer* optimizer);
std::unique_ptr<ModelLoad> load_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer);
std::unique_ptr<ModelLoad> load_of(const std::shared_ptr<AveragedWeights>& average);
/// Loads numbers, texts, generators and the like, without a model.
std::unique_ptr<ModelLoad> load_of_options(const Ranks& ranks);

/// Throws on all ranks if they read different checkpoints. Collective.
void check_same_checkpoint(const Ranks& ranks, const std::string& id);

}  // namespace tessera
