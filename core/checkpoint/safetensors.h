#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/files/file.h"
#include "checkpoint/chunk_source.h"

namespace tessera {

// The format: 8 bytes with the length of a JSON header (little endian), the header, and the
// tensors' bytes. The header has each tensor's name, dtype, shape and place after the header.

/// Returns the format's name of a dtype, such as `BF16`. Throws `c10::NotImplementedError` if it
/// has none.
std::string safetensors_dtype(at::ScalarType dtype);
/// Returns the dtype of such a name. Throws `c10::ValueError`.
at::ScalarType scalar_type_of(const std::string& safetensors_dtype);
/// Returns the bytes of an element of that dtype.
int64_t item_size(const std::string& safetensors_dtype);

/// A tensor's entry in the header.
struct TensorHeader {
  std::string name;
  std::string dtype;  ///< the format's name
  std::vector<int64_t> shape;
};

/// Called with the number of bytes before each write. May wait, to limit the rate of writing, and
/// may throw, to end it.
using BeforeWrite = std::function<void(size_t nbytes)>;

/// A file that is being written: first its header, then the tensors in any order.
class SafetensorsWriter {
 public:
  /// Writes the header. Throws `c10::ValueError` if two tensors have the same name, or one has the
  /// name of the metadata. `before_write` may be empty.
  SafetensorsWriter(File file, std::vector<TensorHeader> tensors,
                    const std::map<std::string, std::string>& metadata,
                    BeforeWrite before_write = {});

  /// Writes the elements of a tensor that the header names, and returns the checksums of their
  /// blocks. Writes straight from memory if it is the CPU's and holds the elements in their logical
  /// order; else copies some at a time.
  std::vector<uint64_t> write(const std::string& name, const at::Tensor& value);

  /// Returns when all written bytes are on the disk.
  void sync() const { file_.sync(); }

 private:
  std::vector<uint64_t> write_blocks(const void* data, int64_t nbytes, int64_t offset);
  void put(const void* data, size_t nbytes, int64_t offset);

  File file_;
  BeforeWrite before_write_;
  std::map<std::string, int64_t> offsets_;  // bytes from the start of the file
  int64_t unsynced_ = 0;
};

/// A file that is open for reading.
class SafetensorsFile final : public ChunkSource {
 public:
  /// Reads the header. Throws `c10::ValueError` if the file has another format, or if its tensors
  /// overlap or exceed the file.
  explicit SafetensorsFile(File file);

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Returns the further names of tied tensors, by the name that each is stored under, as
  /// `save_model` of Python's safetensors notes them in the metadata.
  std::map<std::string, std::vector<std::string>> other_names() const;
  /// Returns each tensor's entry in the header, in the order of their bytes.
  std::vector<TensorHeader> tensors() const;

  /// The tensor may have any shape.
  void check(const std::string& key, const std::string& dtype, int64_t numel) const override;
  void read(const std::string& key, int64_t offset, size_t nbytes, void* out) const override;
  const std::string& path() const override { return file_.path(); }

 private:
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    int64_t numel = 0;
    int64_t offset = 0;  // bytes from the start of the file
    int64_t nbytes = 0;
  };
  using Named = std::pair<const std::string, Entry>;

  void parse(const std::string& header, int64_t data_offset);
  Entry parse_entry(const nlohmann::json& value, int64_t data_offset) const;
  std::vector<const Named*> placed() const;  // in the order of their bytes
  void check_apart() const;
  const Entry& entry(const std::string& key) const;

  File file_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, Entry> entries_;
};

}  // namespace tessera
