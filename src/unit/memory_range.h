#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace tessera {

/// The bytes between the first and the last element of a tensor, both included.
struct MemoryRange {
  /// Null: `begin` and `end` are addresses. Else they count from the start of this storage, which
  /// has no memory yet.
  const void* storage = nullptr;
  uint64_t begin = 0, end = 0;

  bool overlaps(const MemoryRange& other) const {
    return storage == other.storage && begin < other.end && other.begin < end;
  }
  std::pair<const void*, uint64_t> place() const { return {storage, begin}; }
};

/// Empty for a tensor without elements, or without memory that could be shared (sparse ones).
std::optional<MemoryRange> memory_range(const at::Tensor& tensor);

}  // namespace tessera
