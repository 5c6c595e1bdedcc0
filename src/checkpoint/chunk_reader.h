#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/file.h"
#include "checkpoint/index.h"
#include "checkpoint/safetensors.h"

namespace tessera {

/// Reads parts of a checkpoint's tensors from the files that store them.
///
/// The directory is opened once: if a save replaces it in the meantime, nothing of the new
/// checkpoint is mistaken for a part of this one. Reads only the blocks that contain the requested
/// bytes, and verifies their checksums. Every error names the file.
class ChunkReader {
 public:
  explicit ChunkReader(const std::filesystem::path& path);

  const CheckpointIndex& index() const { return index_; }
  const std::string& path() const { return directory_.path(); }

  /// Throws unless the files have everything that `read()` with these arguments would read.
  void check(const TensorRecord& tensor, at::IntArrayRef strides, const Region& region);
  /// Checks the whole tensor.
  void check(const TensorRecord& tensor);

  /// Reads a region into `out`, filling its elements in logical order and converting to its dtype.
  /// Without a box, the region counts elements in the memory order that `strides` describe. If the
  /// tensor was stored in another order, takes twice the memory of the whole tensor.
  void read(const TensorRecord& tensor, at::IntArrayRef strides, const Region& region,
            const at::Tensor& out);
  /// Returns the whole tensor, contiguous. Throws before it allocates memory if the files lack it.
  at::Tensor read_whole(const TensorRecord& tensor);

  /// Reads all of a chunk. Throws `c10::ValueError` if it is damaged.
  void verify(const TensorRecord& tensor, const ChunkRecord& chunk);

 private:
  SafetensorsFile& open_chunk(const TensorRecord& tensor, const ChunkRecord& chunk);
  void read_stored(const TensorRecord& tensor, const Region& region, void* out);
  at::Tensor read_reordered(const TensorRecord& tensor, at::IntArrayRef strides);

  File directory_;
  CheckpointIndex index_;
  std::unordered_map<std::string, SafetensorsFile> open_;
  std::vector<char> block_;
};

}  // namespace tessera
