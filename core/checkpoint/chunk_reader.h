#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/chunk_source.h"
#include "checkpoint/index.h"

namespace tessera {

/// Opens a file that an index names. Called again for a file that was closed in between.
using OpenSource = std::function<std::shared_ptr<const ChunkSource>(const std::string& file)>;

/// Reads parts of a checkpoint's tensors from the files that store them.
///
/// The directory is opened once: if a save replaces it in the meantime, nothing of the new
/// checkpoint is mistaken for a part of this one. Reads only the blocks that contain the requested
/// bytes, and verifies their checksums. Every error names the file.
class ChunkReader {
 public:
  explicit ChunkReader(const std::filesystem::path& path);

  /// Reads files that are no checkpoint's; `index` describes them as chunks without checksums. The
  /// numbers of `index` must be as safe to compute with as those of `index_from_json()`. Throws
  /// `c10::ValueError`, naming `path`, unless its chunks make up whole tensors.
  ChunkReader(std::string path, CheckpointIndex index, OpenSource open);

  const CheckpointIndex& index() const { return index_; }
  const std::string& path() const { return path_; }

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
  const ChunkSource& open_chunk(const TensorRecord& tensor, const ChunkRecord& chunk);
  void read_stored(const TensorRecord& tensor, const Region& region, void* out);
  at::Tensor read_reordered(const TensorRecord& tensor, at::IntArrayRef strides);

  std::string path_;
  OpenSource open_source_;
  CheckpointIndex index_;
  std::unordered_map<std::string, std::shared_ptr<const ChunkSource>> open_;
  std::vector<char> block_;
};

}  // namespace tessera
