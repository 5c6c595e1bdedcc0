#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/process_group.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/shares_memory.h"
#include "memory/memory_watch.h"
#include "mesh/shard_mesh.h"
#include "offload/state_memory.h"
#include "unit/layout.h"
#include "unit/unit_storage.h"

namespace tessera {

/// What all units of a model share.
struct UnitContext {
  ShardMesh mesh;
  std::shared_ptr<StateMemory> offload;  ///< null: nothing is offloaded
  bool master_only = false;  ///< no shard is kept beside a master copy, where one can do
  /// Gathered parameters of units that free them, now. Whole units, on each rank, also where the
  /// ranks of a host have them once.
  int64_t unsharded_bytes = 0;
  int64_t peak_unsharded_bytes = 0;  ///< and at most
  /// One for all contexts of a model.
  std::shared_ptr<MemoryWatch> shared_watch = std::make_shared<MemoryWatch>();
  MemoryWatch& watch = *shared_watch;
};

/// Is told when an operator touches parameters of a model's units.
class UseListener {
 public:
  virtual ~UseListener() = default;
  /// Before the operator: all `units` must be unsharded when this returns. `writes`: it writes to
  /// one of them. Returns the listener, to be kept until `on_used()`.
  virtual std::shared_ptr<UseListener> on_use(const std::vector<Unit*>& units, bool writes) = 0;
  /// After an operator that wrote to parameters of `units`, before `on_used()`.
  virtual void on_write(const std::vector<Unit*>& units) = 0;
  /// After the operator, on the same thread, also if it has thrown.
  virtual void on_used() noexcept = 0;
};

/// The values that parameters have after `Unit::give_back()`.
enum class GivenValues : uint8_t {
  kUsed,     ///< those that operators see, on all ranks alike
  kUpdated,  ///< where this rank updates them, its own: those of its master copy, which are wider
};

/// The parameters that are gathered together, and this rank's shard of them.
///
/// States: kSharded (only the shard exists) -> `unshard()` -> kUnsharding (gather under way) ->
/// `wait()`
/// -> kUnsharded -> `reshard()` -> kSharded. A unit below `ShardLevel::kParameters` has its full
/// buffer always; then the shard is a view of it, and kSharded means that the rest of it is out of
/// date.
///
/// Where the ranks of a host share memory (`ProcessGroup::share`), the full buffer lies there, once
/// for all of them, and the shard is a view of it: nothing is copied, each rank writes its shard
/// only, and a gather waits until all have. On one host nothing is freed, either; on several, what
/// other hosts own is, when all ranks of this one have resharded. User code sees that memory at an
/// address where it can only be read.
///
/// The optimizer updates the shard itself, or the master copy of it (`updated()`) if that has a
/// wider dtype or is offloaded; `publish()` then brings the new values into the shard. A unit that
/// is freed between uses keeps no shard beside a master copy that is offloaded, or if the context
/// says so: what it gives to a gather is then rounded from the master copy.
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
  /// `updated()` have no say any more.
  void thaw();

  /// Undoes `adopt()`: the parameters are ordinary tensors with memory of their own again. The unit
  /// has no memory then and is of no use. Collective, unless `is_whole()`.
  ///
  /// `kUpdated`: throws `c10::NotImplementedError` for a master copy of another dtype.
  void give_back(GivenValues which);
  /// True if the full parameters are here, or on their way, on all ranks.
  bool is_whole() const { return state_ != State::kSharded || context_.mesh.shard().size() == 1; }

  /// Starts gathering the full parameters, in place if they are there. Collective.
  void unshard();
  /// Waits for the gather, if one is under way.
  void wait();
  /// Frees the full parameters, or marks them as out of date if they always exist.
  void reshard();

  /// Before an operator writes to parameters, which must be unsharded: the other ranks must not see
  /// it, as each of them does the same.
  void begin_write();
  /// After it: copies this rank's part into the shard and, where values have changed, into the
  /// master copy, and marks the rest as out of date. All ranks, where memory is shared.
  void write_back();
  /// After it has thrown.
  void cancel_write();

  /// Brings what the optimizer updated into the shard. All but the shard is out of date then.
  void publish();

  /// To be called before the shard is changed: peers may still be reading it. Does not wait for
  /// those that share its memory.
  void wait_until_unread();

  /// Throws if a parameter was given other data. See [Note: Replaced data] in replaced_data.cpp.
  void check_views() const;
  /// A parameter's tensor that was given other data; undefined if there is none.
  at::Tensor replacement(const ParamSlot& slot) const;
  /// Throws `c10::ValueError` if such data can't be the parameter's.
  void check_replacement(const ParamSlot& slot) const;
  /// Takes this rank's part of it into what is updated, which must not be in use, and makes the
  /// parameter a view of this unit again.
  void take_in(const ParamSlot& slot, const std::shared_ptr<void>& keep_alive);

  State state() const { return state_; }
  /// True if the full parameters are freed between uses.
  bool frees() const { return frees_; }
  /// True if the other ranks have the same full parameters in memory as this one.
  bool is_shared() const { return shared_.has_value(); }
  const UnitLayout& layout() const { return layout_; }
  int index() const { return index_; }
  UnitContext& context() const { return context_; }
  UseListener& listener() const { return listener_; }
  const std::string& label() const { return label_; }
  /// The full flat buffer; while sharded, undefined, or of no use but for the shard.
  const at::Tensor& full() const { return full_; }

  /// What the optimizer of this rank updates: its part, which is everything if nothing is sharded.
  /// Of `layout().master_dtype`; in host memory if it is offloaded.
  const at::Tensor& updated() const;
  /// The master copy; undefined if the optimizer updates the shard itself.
  const at::Tensor& master() const { return master_; }
  /// True if the master copy, and with it the state of what is updated, is away from the device.
  bool is_offloaded() const { return is_offloaded_; }
  /// Brings an offloaded master copy to the parameters' device for good. Views of the old one have
  /// no say any more.
  void bring_back();
  /// Bytes of parameters on their device between uses, master copies not counted.
  int64_t resident_nbytes() const;
  /// Bytes of full parameters that come and go, and of what they arrive in or are written to.
  int64_t gathered_nbytes() const;
  int64_t updated_begin() const;
  int64_t updated_end() const;
  /// What this rank updates of a parameter, in elements of the flat buffer.
  std::pair<int64_t, int64_t> updated_range(const ParamSlot& slot) const {
    return overlap(slot, updated_begin(), updated_end());
  }

 private:
  at::TensorOptions options() const;
  void share_memory();
  at::Tensor flat_view(const at::Tensor& bytes) const;
  at::Tensor collect_values(bool broadcast) const;
  void install_views(const std::shared_ptr<void>& keep_alive);
  void install_view(const ParamSlot& slot, const std::shared_ptr<void>& keep_alive);
  void point_to(const ParamSlot& slot, const std::function<at::Tensor()>& make_view) const;
  void move_to_shared_memory();
  at::Tensor values_to_give(GivenValues which) const;
  void restore_taken_out(const ParamSlot& slot, const at::Tensor& values) const;
  void keep_part_of(const at::Tensor& values);
  void keep_written(const at::Tensor& before, const at::Tensor& after);
  at::Tensor shard_of(const at::Tensor& flat) const;
  at::Tensor updated_of(const at::Tensor& flat) const;
  at::Tensor gather_source() const;
  at::Tensor rounded(const at::Tensor& values) const;
  void allocate_full();
  void free_full();
  void count_unsharded(bool is_there);
  void show_full();

  UnitLayout layout_;
  int index_;
  UnitContext& context_;
  UseListener& listener_;
  int rank_;
  bool frees_ = false;
  bool is_offloaded_ = false;
  bool counted_ = false;  // in the context's bytes
  std::string label_;     // "unit 'name'"
  State state_ = State::kUnsharded;
  std::optional<SharedBuffer> shared_;  // what `full_` lies in
  at::Tensor full_;
  at::Tensor arriving_;      // what a gather fills in place of `full_` where parameters are rounded
  at::Tensor written_;       // in place of a shared `full_` while an operator writes
  at::Tensor before_write_;  // this rank's part of another `full_`, if a master copy keeps more
  at::Tensor shard_;         // undefined if the master copy serves as such
  at::Tensor master_;        // undefined if the shard is what is updated
  c10::weak_intrusive_ptr<UnitStorage> storage_;
  WorkPtr gather_;  // the latest
  std::vector<WorkPtr> unread_;  // gathers whose peers may still be reading our shard
};

}  // namespace tessera
