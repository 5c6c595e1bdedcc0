#pragma once

#include <tessera/export.h>
#include <tessera/fully_shard.h>
#include <tessera/sharded_optimizer.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

namespace tessera {

/// Writes the model, its buffers and the optimizer's state and options into the directory `path`.
///
/// Collective. Each rank writes its own shards to one safetensors file; rank 0 adds an index (JSON)
/// and renames the finished directory to `path`, so that a reader sees the old checkpoint or the
/// new one, never a part. `numbers` are the caller's own (the step, say) and come back from
/// `load_checkpoint`. Memory: nothing is gathered.
TESSERA_API void save_checkpoint(const std::filesystem::path& path, const ShardedModule& module,
                                 const ShardedOptimizer* optimizer,
                                 const std::map<std::string, double>& numbers = {});

/// Reads a checkpoint into a sharded model, at any number of ranks, level and partition.
/// Collective.
///
/// Returns the caller's numbers. Throws `c10::ValueError` on every rank, naming what is missing or
/// has another shape; the model is then unchanged.
TESSERA_API std::map<std::string, double> load_checkpoint(const std::filesystem::path& path,
                                                          ShardedModule& module,
                                                          ShardedOptimizer* optimizer);

}  // namespace tessera
