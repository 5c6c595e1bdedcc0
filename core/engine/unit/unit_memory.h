#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "comm/group/capability.h"
#include "engine/offload/state_memory.h"
#include "engine/unit/layout.h"
#include "tensor/shard_mesh.h"

namespace tessera {

struct UnitContext;

/// The unit's name in the errors of the collectives that follow a write by an operator: other ranks
/// may not have made one.
std::string name_after_write(const UnitLayout& layout);

/// The memory of a unit's full flat buffer, of `layout.numel()` elements of `layout.dtype`. This
/// class: a buffer of this rank's own that is always there.
class UnitMemory {
 public:
  UnitMemory(const UnitLayout& layout, UnitContext& context) : layout_(layout), context_(context) {}
  virtual ~UnitMemory() = default;
  UnitMemory(const UnitMemory&) = delete;
  UnitMemory& operator=(const UnitMemory&) = delete;

  /// True if the buffer is freed between uses.
  virtual bool frees() const { return false; }
  /// True if the ranks of this host have one buffer together.
  virtual bool is_shared() const { return false; }
  /// True if this rank's shard is a part of the buffer, and so always there.
  bool holds_shard() const { return is_shared() || !frees(); }

  /// The buffer; undefined while it is freed. In shared memory it is always there, but only this
  /// rank's shard of it is of use while the unit is sharded.
  const at::Tensor& full() const { return full_; }
  /// The buffer as user code is to see it.
  virtual at::Tensor shown() const { return full_; }

  /// Takes the values of all parameters over from `full`.
  virtual void adopt(const at::Tensor& full) { full_ = full; }
  /// Makes room for a gather.
  virtual void allocate() {}
  /// The gathered values are not used any more.
  virtual void free() {}
  /// The unit gives its parameters back: lets go of the buffer.
  void leave();

  /// Waits until no rank reads the old values; call it before applying writes. Collective if the
  /// buffer is shared.
  virtual void wait_for_readers() {}

  /// Bytes that a gather has brought and nobody has freed.
  int64_t gathered_nbytes() const { return is_gathered_ ? layout_.nbytes() : 0; }

 protected:
  /// Counts the buffer among the context's unsharded bytes.
  void count_gathered(bool is_gathered);

  const UnitLayout& layout_;
  UnitContext& context_;
  at::Tensor full_;

 private:
  bool is_gathered_ = false;
};

/// Makes the memory that a unit of this layout has. Collective, as ranks may share it.
std::unique_ptr<UnitMemory> make_unit_memory(const UnitLayout& layout, UnitContext& context);

/// The copy of this rank's part of a unit that the optimizer updates, where it does not update the
/// shard itself: it has a wider dtype, or is offloaded.
class MasterCopy {
 public:
  bool exists() const { return values_.defined(); }
  /// Undefined if there is none.
  const at::Tensor& values() const { return values_; }
  /// True if it is away from the parameters' device.
  bool is_offloaded() const { return is_offloaded_; }

  /// Makes it of `part` (maybe its present values), in `offload` unless that is null.
  void make(const at::Tensor& part, at::ScalarType dtype,
            const std::shared_ptr<StateMemory>& offload);
  /// Moves an offloaded copy to `device` permanently.
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
