#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/memory/shared_memory.h"
#include "comm/group/capability.h"

namespace tessera {

/// The shared-memory buffers that a process group has made, found by the address of a tensor. A
/// buffer is a `T`; it lives as long as a tensor returned by `add()` refers to it. Thread-safe.
template <class T>
class SharedBuffers {
 public:
  /// Registers `buffer` and returns tensors of the first `nbytes` of `memory`; they own it.
  SharedBuffer add(const std::shared_ptr<T>& buffer, SharedMemory& memory, int64_t nbytes) {
    const auto show = [&](const std::byte* data) {
      return at::from_blob(
          const_cast<std::byte*>(data), {nbytes}, [buffer](void*) {},
          at::TensorOptions().dtype(at::kByte));
    };
    const std::lock_guard lock(mutex_);
    std::erase_if(known_, [](const auto& entry) { return entry.second.buffer.expired(); });
    known_[memory.data()] = {buffer, nbytes};
    return {.bytes = show(memory.data()), .read_only = show(memory.read_only())};
  }

  /// Returns the buffer that contains all of `flat`; null if there is none.
  std::shared_ptr<T> holding(const at::Tensor& flat) {
    const auto* const begin = static_cast<const std::byte*>(flat.const_data_ptr());
    const std::lock_guard lock(mutex_);
    const auto next = known_.upper_bound(begin);
    if (next == known_.begin()) return nullptr;
    const auto& [address, known] = *std::prev(next);
    return begin + flat.nbytes() <= address + known.nbytes ? known.buffer.lock() : nullptr;
  }

 private:
  struct Known {
    std::weak_ptr<T> buffer;
    int64_t nbytes = 0;
  };

  std::mutex mutex_;
  std::map<const std::byte*, Known> known_;  // by address in this process
};

}  // namespace tessera
