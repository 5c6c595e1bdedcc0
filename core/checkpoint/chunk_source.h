#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

/// A file of 1-D data by key, from which a `ChunkReader` reads: a rank file of a checkpoint, or a
/// file of another tool.
class ChunkSource {
 public:
  virtual ~ChunkSource() = default;

  /// Throws `c10::ValueError` unless the file has this data. `dtype` as in safetensors.
  virtual void check(const std::string& key, const std::string& dtype, int64_t numel) const = 0;
  /// Reads some bytes of it. Throws `c10::ValueError` if it has fewer.
  virtual void read(const std::string& key, int64_t offset, size_t nbytes, void* out) const = 0;
  virtual const std::string& path() const = 0;
};

}  // namespace tessera
