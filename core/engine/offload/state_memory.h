#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/shard_plan.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera {

/// Memory, away from the parameters' device, for tensors that only the optimizer needs. Belongs to
/// one rank.
class StateMemory {
 public:
  virtual ~StateMemory() = default;

  /// Returns a 1-D tensor in host memory; its values are undefined. Throws if there is no room.
  virtual at::Tensor empty(int64_t numel, at::ScalarType dtype) = 0;

  /// Makes sure that tensors of so many bytes each can be made later. Throws if there is no room.
  virtual void reserve(const std::vector<int64_t>& nbytes) = 0;

  /// Returns true if the memory of `tensor` is part of this one.
  virtual bool holds(const at::Tensor& tensor) const = 0;

  /// Returns true if its tensors come from LibTorch's allocator for CPU tensors.
  virtual bool is_ordinary() const { return false; }

  /// Announces that none of it is used for a while, so that its pages can leave memory.
  virtual void rest() {}
};

/// Returns memory for the state of parameters on `device`; null if the plan offloads nothing.
/// Throws `c10::ValueError` for a directory that can't be used.
std::shared_ptr<StateMemory> make_state_memory(const ShardPlan& plan, at::Device device);

std::shared_ptr<StateMemory> mapped_directory(const std::string& directory);

}  // namespace tessera
