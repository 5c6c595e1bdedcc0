#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/process_group.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/device/device.h"
#include "base/device/side_stream.h"
#include "base/memory/memory_watch.h"
#include "engine/offload/state_memory.h"
#include "engine/unit/layout.h"
#include "engine/unit/parameter_views.h"
#include "engine/unit/unit_memory.h"
#include "engine/unit/unit_storage.h"
#include "tensor/shard_mesh.h"

namespace tessera {

class Progress;

/// State shared by all units of a model.
struct UnitContext {
  ShardMesh mesh;                                  ///< the ranks that train the model
  std::vector<ShardMesh> groups;                   ///< those of `ShardPlan::groups`
  ShardMesh own{single_process_group(), nullptr};  ///< this rank alone
  std::shared_ptr<StateMemory> offload;            ///< null: nothing is offloaded
  /// Of copies between offloaded state and devices.
  std::shared_ptr<SideStreams> copies = std::make_shared<SideStreams>();
  /// Gathers that this rank has begun over connections that do not compare them.
  int64_t unchecked_gathers = 0;
  /// Why the ranks can't be in step again; empty while they are.
  std::string lost;
  bool master_only = false;  ///< units keep no shard beside a master copy, if they are freed
  /// How far this rank has come; null where no other rank asks for it. Belongs to the mesh.
  Progress* progress = nullptr;
  /// Bytes of the units that are gathered now and will be freed. Each rank counts whole units, also
  /// where the ranks of a host have one copy.
  int64_t unsharded_bytes = 0;
  int64_t peak_unsharded_bytes = 0;  ///< the most so far
  MemoryWatch watch;

  /// The ranks that share the parameters of a unit.
  const ShardMesh& mesh_of(const UnitLayout& layout) const {
    if (layout.group == kOwnGroup) return own;
    return layout.group == 0 ? mesh : groups[layout.group - 1];
  }
};

/// Listens to operators that use parameters of a model's units.
class UseListener {
 public:
  virtual ~UseListener() = default;
  /// Before the operator: all `units` must be unsharded when this returns. `writes`: it writes to
  /// one of them. Returns the listener, to be kept until `on_used()`.
  virtual std::shared_ptr<UseListener> on_use(const std::vector<Unit*>& units, bool writes) = 0;
  /// After an operator that wrote to parameters of `units`, before `on_used()`.
  virtual void on_write(const std::vector<Unit*>& units) = 0;
  /// After the operator, on the same thread, even if it has thrown.
  virtual void on_used() noexcept = 0;
};

/// The values that parameters have after `Unit::give_back()`.
enum class GivenValues : uint8_t {
  kUsed,     ///< the values that operators see, equal on all ranks
  kUpdated,  ///< the wider ones of this rank's master copy, for the part that this rank updates
};

/// Parameters that are gathered together, and this rank's shard of them.
///
/// A unit is kSharded (only the shard is of use), kUnsharding (a gather is under way) or
/// kUnsharded:
///
///   kSharded --unshard()--> kUnsharding --wait()--> kUnsharded --reshard()--> kSharded
///
/// Three parts know the rest. `UnitMemory` is the full flat buffer: always there, freed while the
/// unit is sharded, or shared by the ranks of a host. `ParameterViews` are the user's tensors,
/// views of it. `MasterCopy`, if there is one, is updated by the optimizer in place of the shard;
/// `publish()` brings its values into the shard.
///
/// A unit that is freed between uses keeps no shard beside an offloaded master copy, or beside any
/// master copy if the context says so: a gather then sends values rounded from the master copy.
class Unit {
 public:
  enum class State : uint8_t { kSharded, kUnsharding, kUnsharded };

  /// Collective, as it may make memory that ranks share.
  Unit(UnitLayout layout, int index, UnitContext& context, UseListener& listener);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  /// Takes over the parameters: copies their values (rank 0's, if `broadcast`) into the flat buffer
  /// and makes them views of this unit. Collective if `broadcast`.
  void adopt(const std::shared_ptr<void>& keep_alive, bool broadcast);

  /// Gives a unit that was frozen when it was laid out the master copy that the plan has for
  /// parameters that are trained; does nothing for others. Not collective. Views of the old
  /// `updated()` are out of use then.
  void thaw();

  /// Undoes `adopt()`: makes the parameters ordinary tensors with memory of their own again. The
  /// unit can't be used then. Collective, unless `is_whole()`.
  ///
  /// With `kUpdated`, throws `c10::NotImplementedError` for a master copy of another dtype.
  void give_back(GivenValues which);
  /// True if the full parameters are here, or on their way, on all ranks.
  bool is_whole() const { return state_ != State::kSharded || mesh().shard().size() == 1; }

  /// Starts gathering the full parameters, in place if they are there. Collective.
  void unshard();
  /// Waits for the gather, if one is under way.
  void wait();
  /// Frees the full parameters, or marks them as out of date if they always exist.
  void reshard();

  /// Prepares the parameters for an operator that writes to them. They must be unsharded. Other
  /// ranks must not see the writes, as each of them executes the operator itself.
  void begin_write();
  /// Takes over the writes of the operator: copies this rank's part into the shard and, where
  /// values have changed, into the master copy, and marks the rest as out of date. Collective if
  /// memory is shared.
  void write_back();
  /// Discards the writes of an operator that has thrown.
  void cancel_write();

  /// Copies the values that the optimizer updated into the shard. The rest of the full parameters
  /// is out of date then.
  void publish();

  /// Waits until no peer reads the shard any more, and until an offloaded master copy has been
  /// copied to the device; must be called before they are changed. Does not wait for ranks that
  /// share its memory.
  void wait_until_unread();

  /// The parameters' tensors. They may have been given other data.
  const ParameterViews& views() const { return views_; }
  /// Copies this rank's part of such data into `updated()`, and makes the parameter a view of this
  /// unit again. `updated()` must not be in use.
  void take_in(const ParamSlot& slot, const std::shared_ptr<void>& keep_alive);

  State state() const { return state_; }
  /// True if the full parameters are freed between uses.
  bool frees() const { return memory_->frees(); }
  /// True if the other ranks have the same full parameters in memory as this one.
  bool is_shared() const { return memory_->is_shared(); }
  const UnitLayout& layout() const { return layout_; }
  int index() const { return index_; }
  UnitContext& context() const { return context_; }
  /// The ranks that share this unit.
  const ShardMesh& mesh() const { return context_.mesh_of(layout_); }
  UseListener& listener() const { return listener_; }
  const std::string& label() const { return label_; }
  /// The full flat buffer. While the unit is sharded, it is undefined, or only the shard is valid.
  const at::Tensor& full() const { return memory_->full(); }

  /// The values that this rank's optimizer updates: its shard or the master copy of it; all
  /// elements if nothing is sharded. Its dtype is `layout().master_dtype`; in host memory if
  /// offloaded.
  const at::Tensor& updated() const;
  /// The copy that the optimizer updates, if it does not update the shard itself.
  const MasterCopy& master() const { return master_; }
  /// Moves an offloaded master copy to the parameters' device permanently. Views of the old one are
  /// out of use then.
  void bring_back();
  /// Bytes of parameters on their device between uses, master copies not counted.
  int64_t resident_nbytes() const;
  /// Bytes of gathered parameters that will be freed, and of buffers for gathers and writes.
  int64_t gathered_nbytes() const;
  int64_t updated_begin() const;
  int64_t updated_end() const;
  /// The range of a parameter that this rank updates, in elements of the flat buffer.
  std::pair<int64_t, int64_t> updated_range(const ParamSlot& slot) const {
    return overlap(slot, updated_begin(), updated_end());
  }

 private:
  // What operators write to the parameters.
  struct OperatorWrite {
    at::Tensor values;     // written in place of the memory, where that is shared
    at::Tensor before;     // the values of this rank's part before, if a master copy keeps more
    bool is_last = false;  // nothing was gathered since
    std::string name;      // `name_after_write()`; gathers in progress refer to it
  };

  int rank() const { return mesh().shard().rank(); }
  at::Tensor collect_values(bool broadcast) const;
  void keep_part_of(const at::Tensor& values);
  void keep_written(const at::Tensor& before, const at::Tensor& after);
  at::Tensor values_to_give(GivenValues which) const;
  void restore_taken_out(const ParamSlot& slot, const at::Tensor& values) const;
  at::Tensor shard_of(const at::Tensor& flat) const;
  at::Tensor updated_of(const at::Tensor& flat) const;
  at::Tensor gather_source() const;
  WorkPtr start_gather() const;
  void begin_gather();
  void wait_for_upload();
  /// True if values of the master copy come from host memory to a device.
  bool is_uploaded() const { return master_.is_offloaded() && !computes_on_host(layout_.device); }
  const at::Tensor& gathered() const { return arriving_.defined() ? arriving_ : full(); }
  at::Tensor rounded(const at::Tensor& values) const;
  at::Tensor rounded_shards(const at::Tensor& values) const;
  at::Tensor shown(int64_t begin, int64_t end) const;
  void show() const;

  UnitLayout layout_;
  const int index_;
  UnitContext& context_;
  UseListener& listener_;
  const std::string label_;  // "unit 'name'"
  State state_ = State::kUnsharded;
  const std::unique_ptr<UnitMemory> memory_;
  ParameterViews views_;
  MasterCopy master_;
  at::Tensor shard_;     // undefined if the master copy serves as such
  at::Tensor arriving_;  // filled by a gather in place of the memory, where parameters are rounded
  OperatorWrite write_;
  std::optional<c10::Event> uploaded_;  // behind the latest copy of an offloaded master copy
  WorkPtr gather_;                      // the latest
  std::vector<WorkPtr> unread_;         // gathers whose peers may still be reading our shard
};

}  // namespace tessera
