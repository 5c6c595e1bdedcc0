#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <unordered_map>

#include "checkpoint/file.h"
#include "checkpoint/index.h"
#include "checkpoint/safetensors.h"

namespace tessera {

/// Reads ranges of a checkpoint's tensors from the files that have them.
///
/// The directory is opened once: if a save replaces it in the meantime, nothing of the new
/// checkpoint is taken for a part of this one.
class ChunkReader {
 public:
  explicit ChunkReader(const std::filesystem::path& path);

  const CheckpointIndex& index() const { return index_; }

  /// Throws unless elements [begin, end) are there.
  void check(const TensorRecord& tensor, int64_t begin, int64_t end);

  /// Reads elements [begin, end) in the order of memory that `strides` describe, into `out`, whose
  /// elements are taken in its logical order. Takes the memory of the whole tensor, twice, if it
  /// was stored in another order.
  void read(const TensorRecord& tensor, at::IntArrayRef strides, int64_t begin, int64_t end,
            const at::Tensor& out);

 private:
  SafetensorsFile& file(const std::string& name);
  void read_stored(const TensorRecord& tensor, int64_t begin, int64_t end, void* out);
  at::Tensor read_reordered(const TensorRecord& tensor, at::IntArrayRef strides);

  File directory_;
  CheckpointIndex index_;
  std::unordered_map<std::string, SafetensorsFile> open_;
};

}  // namespace tessera
