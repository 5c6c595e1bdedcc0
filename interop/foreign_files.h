#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/index.h"
#include "interop/torch_file.h"

namespace tessera {

/// Tensors of files that another tool wrote, described as those of a checkpoint: of the kind
/// `tensor`, in chunks without checksums.
struct ForeignFiles {
  std::string path;
  CheckpointIndex index;
  OpenSource open;
  /// Set if the only file is one of `torch.save`, whose pickle has more than tensors.
  std::shared_ptr<const TorchFile> torch_file = nullptr;

  ChunkReader reader() const { return ChunkReader(path, index, open); }
};

/// Opens files of the kinds that `load_safetensors()` lists. Reads headers only. The numbers of the
/// index are safe to compute with. Throws `c10::ValueError`, naming the file, if one is missing or
/// damaged, and for a directory of other files.
ForeignFiles open_foreign(const std::filesystem::path& path);

/// Opens a directory of `torch.distributed.checkpoint`, which has a file `.metadata`. Adds a tensor
/// for each tensor, under its full name.
ForeignFiles open_dcp(const std::filesystem::path& directory);
bool is_dcp(const std::filesystem::path& path);

/// Adds a tensor that is stored whole, row by row, in a file of this name.
void add_foreign_tensor(CheckpointIndex& index, std::vector<std::string> names,
                        const std::string& dtype, std::vector<int64_t> shape,
                        const std::string& file, const std::string& key);

}  // namespace tessera
