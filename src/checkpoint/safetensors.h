#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/fully_shard.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/file.h"

namespace tessera {

// The format: 8 bytes that hold the length of a JSON header (little endian), the header, and the
// tensors' bytes. The header names each tensor with its dtype, shape and place after the header.

/// The format's name of a dtype, such as `BF16`. Throws `c10::NotImplementedError` for one it
/// lacks.
std::string safetensors_dtype(at::ScalarType dtype);
/// The dtype of such a name. Throws `c10::ValueError`.
at::ScalarType scalar_type_of(const std::string& safetensors_dtype);

/// Writes 1-D contiguous tensors, straight from their memory if it is the CPU's.
void write_safetensors(File& file, std::vector<NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata);

/// A file of 1-D tensors that is open for reading.
class SafetensorsFile {
 public:
  /// Reads the header. Throws `c10::ValueError` if the file is of another format.
  explicit SafetensorsFile(File file);

  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// Throws `c10::ValueError` unless the file has this tensor.
  void check(const std::string& key, const std::string& dtype, int64_t numel) const;

  /// Reads elements [begin, end) of a tensor that was checked.
  void read(const std::string& key, int64_t begin, int64_t end, void* out) const;

 private:
  struct Entry {
    std::string dtype;
    int64_t numel = 0;
    int64_t offset = 0;  // bytes from the start of the file
    int64_t nbytes = 0;
  };

  void parse(const std::string& header, int64_t data_offset);

  File file_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, Entry> entries_;
};

}  // namespace tessera
