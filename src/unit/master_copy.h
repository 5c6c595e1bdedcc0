#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "offload/state_memory.h"

namespace tessera {

/// The copy of this rank's part of a unit that the optimizer updates, where it does not update the
/// shard itself: it has a wider dtype, or is offloaded.
class MasterCopy {
 public:
  bool exists() const { return values_.defined(); }
  /// Undefined if there is none.
  const at::Tensor& values() const { return values_; }
  /// True if it is away from the parameters' device.
  bool is_offloaded() const { return is_offloaded_; }

  /// Makes it of `part`, which may be its present values, in `offload` unless that is null.
  void make(const at::Tensor& part, at::ScalarType dtype,
            const std::shared_ptr<StateMemory>& offload);
  /// Brings an offloaded copy to `device` for good.
  void bring_back(at::Device device);
  /// Takes over the elements of `after` that differ from `before`: the others keep the bits that
  /// the parameters do not show.
  void take_changed(const at::Tensor& before, const at::Tensor& after);
  void reset() { values_.reset(); }

 private:
  at::Tensor values_;
  bool is_offloaded_ = false;
};

}  // namespace tessera
