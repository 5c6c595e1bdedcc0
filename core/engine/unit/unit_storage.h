#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>

#include "base/dispatch/unit_key.h"

namespace tessera {

class Unit;

/// The storage shared by all parameters of a unit, their views, and the tensors that autograd has
/// saved of them.
///
/// It borrows the unit's memory while the unit is unsharded; otherwise a raw `data_ptr()` throws.
/// It keeps the sharded model alive, so that the module works for as long as it exists.
class UnitStorage final : public c10::StorageImpl {
 public:
  UnitStorage(Unit& unit, std::shared_ptr<void> keep_alive, size_t nbytes, at::Device device);

  /// Null once its parameters were given back.
  Unit* unit() const { return unit_; }

  /// Lets the storage show the memory of `full`; an undefined tensor takes it away.
  void show(const at::Tensor& full, const std::string& why_not);

  /// The unit gives its parameters back: tensors that still are views of this (that the user or
  /// autograd keeps) have `memory` from now on, and nothing to do with the unit any more.
  void leave_unit(at::Tensor memory);

  /// Called when the last tensor on this storage was destroyed. Units still hold weak pointers to
  /// it, with which it would keep them alive for ever.
  void release_resources() override;

 private:
  Unit* unit_;
  std::shared_ptr<void> keep_alive_;
  at::Tensor left_;  // the memory, without a unit
};

/// The unit whose memory `tensor` (a parameter or a view of one) shows, or null. For a DistTensor,
/// the unit of this rank's part.
Unit* unit_of(const at::Tensor& tensor);

}  // namespace tessera
