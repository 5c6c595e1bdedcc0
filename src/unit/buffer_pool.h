#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tessera {

/// Keeps the memory of freed unit buffers for the next unit that needs about as much.
///
/// Units are gathered and freed many times a step: a heap that gave their pages back would fault
/// them in again each time. Thread-safe; buffers may outlive the pool.
class BufferPool {
 public:
  BufferPool();

  /// A 1-D tensor of `numel` elements with undefined values. Its memory returns to the pool when
  /// the last tensor on it is gone.
  at::Tensor take(int64_t numel, at::ScalarType dtype, at::Device device);

  /// Gives the memory of unused buffers back to the system.
  void trim();

 private:
  struct Blocks;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace tessera
