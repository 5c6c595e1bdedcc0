#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "interop/foreign_files.h"
#include "interop/torch_file.h"

namespace tessera {

/// A directory that `torch.distributed.checkpoint` saved: see [Note: Reading a DCP directory].
class DcpDirectory {
 public:
  /// A part of a file in which `torch.save` wrote a chunk of a tensor, or another value.
  struct Place {
    std::string file;
    int64_t offset = 0, nbytes = 0;
    std::vector<int64_t> sizes;  ///< of a chunk
  };

  /// Reads the metadata. Throws `c10::ValueError`, naming the file, if it is damaged, if files are
  /// missing, or if the parts of two values overlap.
  explicit DcpDirectory(const std::filesystem::path& directory);

  /// Has a tensor of the kind `tensor` for each tensor, under its full name. Its numbers are safe
  /// to compute with.
  const CheckpointIndex& index() const { return index_; }
  /// Values that are no tensors, by their full names.
  const std::map<std::string, Place>& values() const { return values_; }
  /// Reads such a value.
  TorchFile read(const Place& place) const;

  /// Opens the files that the index names. They may outlive this object.
  OpenSource opener() const;

 private:
  void parse(const Pickle& pickle);
  void check_apart() const;

  std::filesystem::path path_;
  CheckpointIndex index_;
  std::map<std::string, Place> values_;
  using Places = std::map<std::string, Place>;
  std::shared_ptr<Places> chunks_ = std::make_shared<Places>();  // by key
};

constexpr const char* kDcpMetadataFile = ".metadata";

/// Names of `torch` for a dtype as in safetensors (`float32` for `F32`), and back; empty if there
/// is none.
std::string torch_dtype_name(const std::string& dtype);
std::string dtype_of_torch_name(std::string_view name);

}  // namespace tessera
