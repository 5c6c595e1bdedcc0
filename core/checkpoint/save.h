#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/chunks.h"
#include "comm/group/progress.h"
#include "tensor/shard_mesh.h"

namespace tessera {

/// The data to save, and the ranks that save it together.
struct SaveJob {
  Ranks ranks;
  std::shared_ptr<const void> owner;  ///< of the process groups of `ranks`, and of `progress`
  Progress* progress = nullptr;       ///< of this rank; may be null
  /// Collects the data that this rank stores; may throw. Not collective.
  std::function<void(ChunkCollector&)> collect;
  /// The model whose parameters are gathered and stored whole; null: none.
  ShardedState* whole = nullptr;
  /// Replicas that save by themselves (`ShardPlan::outer`); null: none.
  ProcessGroupPtr replicas = nullptr;
  /// Names that all ranks must have.
  std::vector<std::string> names = {};
  KeptCheckpoints keep = {};
  /// Ordinary tensors that each rank may have changed by itself. Rank 0's are the model's; those of
  /// other ranks, where they differ, are stored with the rank's own tensors.
  std::vector<NamedTensor> buffers = {};
  std::string name = {};             ///< of one of several models
  std::vector<SaveJob> models = {};  ///< over the same ranks, in subdirectories
};

/// `options`, and all that it points to, must outlive the job.
SaveJob job_of(const ShardedModule& module, const ShardedOptimizer* optimizer,
               const SaveOptions& options);
SaveJob job_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer,
               const SaveOptions& options);
/// The models' own jobs have no options but `whole_parameters`.
SaveJob job_of(const std::vector<CheckpointModel>& models, const SaveOptions& options);
SaveJob job_of(const StateDict& state);

/// Adds the objects that are saved along with a model. Throws for invalid options.
void add_options(ChunkCollector& contents, const SaveOptions& options);

/// A save whose draft exists.
struct BegunSave {
  std::unique_ptr<CheckpointWriter> writer;
  RankContents contents;  ///< views of memory that may change once training goes on
};

/// Checks everything that can be checked before a byte is written, creates the draft, and collects
/// the data that this rank stores. If `job.whole` is set, writes that model. Collective; if a rank
/// fails, all ranks throw.
BegunSave begin_save(const std::filesystem::path& path, const SaveJob& job);

/// Saves, and returns when the checkpoint is in its place. Collective; if a rank fails, all ranks
/// throw.
void run_save(const std::filesystem::path& path, const SaveJob& job);

}  // namespace tessera
