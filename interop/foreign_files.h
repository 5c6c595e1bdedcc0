#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/index.h"

namespace tessera {

/// Tensors of files that another tool wrote, described as those of a checkpoint: of the kind
/// `tensor`, in chunks without checksums.
struct ForeignFiles {
  std::string path;
  CheckpointIndex index;
  OpenSource open;

  ChunkReader reader() const { return ChunkReader(path, index, open); }
};

/// Opens files of the kinds that `load_safetensors()` lists. Reads headers only. The numbers of the
/// index are safe to compute with. Throws `c10::ValueError`, naming the file, if one is missing or
/// damaged, and for a directory of other files.
ForeignFiles open_foreign(const std::filesystem::path& path);

}  // namespace tessera
