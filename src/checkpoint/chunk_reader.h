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

/// Reads parts of a checkpoint's tensors from the files that have them.
///
/// The directory is opened once: if a save replaces it in the meantime, nothing of the new
/// checkpoint is taken for a part of this one. Not more is read than asked for, in whole blocks
/// whose checksums are compared. Every error names the file.
class ChunkReader {
 public:
  explicit ChunkReader(const std::filesystem::path& path);

  const CheckpointIndex& index() const { return index_; }
  const std::string& path() const { return directory_.path(); }

  /// Throws unless the files have all that `read()` of the same would take from them.
  void check(const TensorRecord& tensor, at::IntArrayRef strides, const Region& region);
  /// The same of the whole tensor.
  void check(const TensorRecord& tensor);

  /// Reads a region into `out`, whose elements are taken in its logical order, and converted to its
  /// dtype. Without a box the region's elements are counted in the order of memory that `strides`
  /// describe. Takes the memory of the whole tensor, twice, if it was stored in another order.
  void read(const TensorRecord& tensor, at::IntArrayRef strides, const Region& region,
            const at::Tensor& out);
  /// The whole tensor, contiguous. Throws before it takes memory if the files have it not.
  at::Tensor read_whole(const TensorRecord& tensor);

  /// Reads all of a chunk, and throws `c10::ValueError` if something is wrong with it.
  void verify(const TensorRecord& tensor, const ChunkRecord& chunk);

 private:
  SafetensorsFile& file(const std::string& name);
  SafetensorsFile& open_chunk(const TensorRecord& tensor, const ChunkRecord& chunk);
  void read_stored(const TensorRecord& tensor, const Region& region, void* out);
  at::Tensor read_reordered(const TensorRecord& tensor, at::IntArrayRef strides);

  File directory_;
  CheckpointIndex index_;
  std::unordered_map<std::string, SafetensorsFile> open_;
  std::vector<char> block_;
};

}  // namespace tessera
