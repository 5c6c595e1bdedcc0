#pragma once

#include <tessera/interop/exchange.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/index.h"

namespace tessera {

/// The parts of a checkpoint that an export writes, under the names that they get.
class ExportedModel {
 public:
  ExportedModel(const std::filesystem::path& path, const ExportOptions& options);

  /// Parameters and buffers, in the order of the index.
  const std::vector<const TensorRecord*>& tensors() const { return tensors_; }
  /// The optimizer's tensors for a parameter, by its first name; none if no optimizer is exported.
  const std::vector<const TensorRecord*>& states_of(const std::string& param) const;
  /// Null if no optimizer is exported.
  const OptimizerRecord* optimizer() const {
    return options_.optimizer_key.empty() ? nullptr : &*index_.optimizer;
  }
  const ExportOptions& options() const { return options_; }

  /// Returns the dtype that a tensor gets, as in safetensors.
  std::string dtype_of(const TensorRecord& record) const;
  int64_t nbytes_of(const TensorRecord& record) const;
  /// Reads a tensor in that dtype, and counts its bytes as done.
  at::Tensor read(const TensorRecord& record);

 private:
  const ExportOptions& options_;
  ChunkReader reader_;
  CheckpointIndex index_;  // with the new names
  std::vector<const TensorRecord*> tensors_;
  std::map<std::string, std::vector<const TensorRecord*>> states_;
  int64_t done_ = 0, total_ = 0;
};

/// Write into a file, or into an empty directory.
void write_safetensors(const std::filesystem::path& file, ExportedModel& model);
void write_torch(const std::filesystem::path& file, ExportedModel& model);
/// Hugging Face's set of safetensors files and their index.
void write_hugging_face(const std::filesystem::path& directory, ExportedModel& model);
/// A directory of `torch.distributed.checkpoint`.
void write_dcp(const std::filesystem::path& directory, ExportedModel& model);

}  // namespace tessera
