#pragma once

#include <tessera/checkpoint/checkpoint_files.h>

#include <filesystem>
#include <vector>

#include "checkpoint/chunk_reader.h"

namespace tessera {

/// Opens a checkpoint and, if it has several models, those; its own reader comes first.
std::vector<ChunkReader> open_with_models(const std::filesystem::path& path);

/// Returns what `inspect_checkpoint()` does, for `readers` of `open_with_models()`.
CheckpointSummary summary_of(const std::filesystem::path& path,
                             const std::vector<ChunkReader>& readers);

}  // namespace tessera
