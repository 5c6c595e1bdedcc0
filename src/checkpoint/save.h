#pragma once

#include <tessera/checkpoint.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/chunks.h"
#include "mesh/ranks.h"

namespace tessera {

/// What is to be saved, and the ranks that do it together.
struct SaveJob {
  Ranks ranks;
  std::shared_ptr<const void> owner;  ///< of the process groups of `ranks`
  /// What this rank stores; may throw. Not collective.
  std::function<void(ChunkCollector&)> collect;
  /// Of which parameters are gathered and stored whole; null: none.
  ShardedState* whole = nullptr;
  /// Names that all ranks must have.
  std::vector<std::string> names = {};
  int keep_last = 0;
  /// Ordinary tensors that each rank may have changed by itself. Rank 0's are the model's; others'
  /// that differ are stored with what the rank has for itself.
  std::vector<NamedTensor> buffers = {};
};

/// `options` and all that they point to must outlive the job.
SaveJob job_of(const ShardedModule& module, const ShardedOptimizer* optimizer,
               const SaveOptions& options);
SaveJob job_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer,
               const SaveOptions& options);
SaveJob job_of(const StateDict& state);

/// A save whose draft is there.
struct BegunSave {
  std::unique_ptr<CheckpointWriter> writer;
  RankContents contents;  ///< views of memory that may change once training goes on
};

/// Checks all that can be checked before a byte is written, makes the draft, and collects what this
/// rank stores. Of `job.whole`, writes the model. Collective; throws on all ranks alike.
BegunSave begin_save(const std::filesystem::path& path, const SaveJob& job);

}  // namespace tessera
