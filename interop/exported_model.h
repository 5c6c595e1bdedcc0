#pragma once

#include <tessera/interop/exchange.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/index.h"

namespace tessera {

/// The parts of a checkpoint that an export writes, under the names that they get.
class ExportedModel {
 public:
  /// `with_state`: the tensors of the optimizer's state, too.
  ExportedModel(const std::filesystem::path& path, ExportOptions options, bool with_state = false);

  const CheckpointIndex& index() const { return index_; }
  const std::vector<TensorRecord>& tensors() const { return index_.tensors; }
  const ExportOptions& options() const { return options_; }

  /// Returns the dtype that a tensor gets, as in safetensors.
  std::string dtype_of(const TensorRecord& record) const;
  int64_t nbytes_of(const TensorRecord& record) const;
  /// Reads a tensor in that dtype, and counts its bytes as done.
  at::Tensor read(const TensorRecord& record);

 private:
  ExportOptions options_;
  ChunkReader reader_;
  CheckpointIndex index_;  // with the new names
  int64_t done_ = 0, total_ = 0;
};

/// Write into a file, or into an empty directory.
void write_safetensors(const std::filesystem::path& file, ExportedModel& model);
/// Hugging Face's set of safetensors files and their index.
void write_hugging_face(const std::filesystem::path& directory, ExportedModel& model);

}  // namespace tessera
