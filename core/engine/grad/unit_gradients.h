#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/unit/unit.h"
#include "tensor/shard_mesh.h"

namespace tessera {

/// A reduction of gradients in flight, of one unit or of several: over the shard dim, and then, in
/// place, over the replicate dim.
class Reduction {
 public:
  /// Starts the reduction. All ranks must call it. `out` is this rank's part of the sum; see
  /// `ProcessGroup::reduce_scatter` for the other arguments. `subject` must live as long as the
  /// mesh is used.
  Reduction(const ShardMesh& mesh, const at::Tensor& out, std::vector<Piece> pieces,
            std::span<const int64_t> bounds, const ReduceScatterOptions& options,
            std::string_view subject);

  /// All ranks, with a replicate dim: waits for the sum, then starts adding up the sums of the
  /// replicas.
  void replicate();
  /// On a device, lets the current stream wait, not the host.
  void wait();
  bool is_completed() { return work_->is_completed(); }

 private:
  const ShardMesh& mesh_;
  at::Tensor out_;
  std::string_view subject_;
  WorkPtr work_;
  WorkPtr first_;  // over the shard dim, if `work_` is over the replicate dim, on a device
};

/// Returns memory for `numel` reduced gradients. Its values are undefined, but zeros where the sums
/// are sent in blocks: gradients may share a block with padding that nothing writes to.
at::Tensor memory_for_sums(const UnitLayout& layout, int64_t numel);

/// Takes gradients out of `.grad`, and passes them to `UnitGradients::arrive()`. Any thread calls
/// it.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  virtual void take(size_t unit, size_t slot, size_t handle, const at::Tensor& tensor) = 0;
};

/// The gradients of one unit, from autograd's tensors to the reduced part that this rank keeps.
///
/// See [Note: The way of a gradient] in unit_gradients.cpp.
class UnitGradients {
 public:
  /// Local gradients are divided by `predivide`, and their sum over ranks is multiplied by `scale`.
  /// `sink` must live as long as backwards run; null if `take()` is never called.
  UnitGradients(Unit& unit, GradientSink* sink, double scale, double predivide);
  virtual ~UnitGradients() = default;

  /// Called when a gradient is in `.grad` of `tensor`, number `handle` of the tensors of the
  /// parameter in `slot`, and the user's hook has run.
  void take(size_t slot, size_t handle, const at::Tensor& tensor) const {
    sink_->take(unit_.index(), slot, handle, tensor);
  }

  /// Begins a backward, in which nothing has arrived yet.
  void begin_backward();
  /// Takes the gradient that autograd made for a tensor of the parameter in `slot`.
  void arrive(size_t slot, size_t handle, const at::Tensor& grad);
  /// Returns true once the gradients of all trainable tensors have arrived in this backward.
  bool is_complete() const;
  bool has_arrived(size_t slot) const { return slots_[slot].arrived; }
  bool any_arrived() const;

  /// All ranks: starts reducing the gradients that have arrived; parameters without one count as
  /// zeros.
  void launch();
  /// Launch in a reduction of several units, in two steps. The first sets `part` as the
  /// destination of this unit's sum (see `GradBucket`), and returns the gradients that have arrived
  /// here; `follow()` then sets the reduction.
  std::vector<Piece> launch_into(const at::Tensor& part, bool apart);
  void follow(std::shared_ptr<Reduction> reduction) { reduction_ = std::move(reduction); }
  /// The reduction that `launch()` started, or that was set for several units; null before and
  /// after.
  const std::shared_ptr<Reduction>& reduction() const { return reduction_; }
  bool is_reducing() const { return reduction_ != nullptr; }
  /// On a device: lets the current stream wait for the reduction, so that the whole gradients are
  /// freed.
  void wait_on_stream() {
    if (reduction_) reduction_->wait();
  }
  /// Returns true if the reduction, or that over the replicas if it has been started, is done.
  bool is_reduced() const { return !reduction_ || reduction_->is_completed(); }
  /// All ranks, at `ShardLevel::kNone`: waits for the reduction, and starts gathering its result;
  /// `settle()` waits for that. Does nothing at other levels, and where the reduction gathers it.
  void start_gather();
  /// All ranks: waits for the reduction. From then on, parameters with `used[slot]` have a
  /// gradient.
  void settle(const std::vector<bool>& used);

  /// Drops the gradient of one parameter, or of all, whether it has arrived, is being reduced, or
  /// is reduced.
  virtual void clear(size_t slot);
  virtual void clear_all();
  /// Return how often that was done for a parameter, and begin to count anew.
  int clears(size_t slot) const { return slots_[slot].clears; }
  void forget_clears() {
    for (SlotState& slot : slots_) slot.clears = 0;
  }
  /// Turns all existing gradients into zeros that are not reduced yet. The next backward reduces
  /// these even where it does not use the parameter.
  virtual void zero_all();
  /// Turns the existing gradient of one parameter into zeros; a reduced one stays reduced.
  virtual void zero(size_t slot);
  /// Returns true if the parameter's gradient is a zero that is not reduced, and nothing has
  /// arrived since.
  bool is_zero(size_t slot) const { return slots_[slot].arrived && slots_[slot].zero; }
  /// Clears the gradient of one parameter as an optimizer's `zero_grad()` does, also one that the
  /// user has set in `.grad`.
  void zero_grad(size_t slot, bool set_to_none);
  /// Returns true if the parameter has a gradient, wherever that is.
  bool has_gradient(size_t slot) const;

  /// Returns true if the parameter has a reduced gradient. All ranks agree.
  virtual bool is_live(size_t slot) const { return slots_[slot].live; }
  bool any_live() const;
  /// Returns the reduced gradient of elements [begin, end) of the flat buffer. They must be this
  /// rank's, and of one parameter.
  virtual at::Tensor reduced(int64_t begin, int64_t end) const;
  /// Returns all of this rank's part; undefined if there is none.
  const at::Tensor& reduced() const { return reduced_; }
  int64_t nbytes() const;
  /// Returns the bytes of whole gradients that have arrived and were not reduced, and of those
  /// being sent, as far as a memory watch was active.
  int64_t in_flight_nbytes() const;

  double scale() const { return scale_; }
  Unit& unit() const { return unit_; }

 private:
  // The gradient of one parameter.
  struct SlotState {
    bool arrived = false;    // and not launched; possibly in an earlier backward
    bool zero = false;       // it has arrived by `zero()`
    std::vector<bool> seen;  // by handle: arrived in this backward
    bool live = false;
    bool cleared = false;  // during the reduction: its result does not count
    int clears = 0;
  };

  void drop_arrivals();
  void finish_reduction();
  void finish_sum();
  at::Tensor shard_part() const;
  bool gathers_in_reduction() const;
  size_t chunk_of(size_t slot) const;
  at::Tensor place_of(size_t slot);
  std::vector<Piece> take_pieces();
  bool prepare_reduced();
  at::Tensor predivided(const at::Tensor& grad) const;
  bool holds_any() const;

  Unit& unit_;
  GradientSink* sink_;
  double scale_;
  double predivide_;
  std::vector<at::Tensor> chunks_;  // 1-D, local sums; undefined until a gradient arrives
  std::vector<SlotState> slots_;
  at::Tensor reduced_;
  at::Tensor partial_;                 // destination of the sum, if not `reduced_` itself
  std::shared_ptr<at::Tensor> error_;  // what messages have lost; null if losses are forgotten
  at::Tensor gather_error_;            // what the gather of the sums has lost of this rank's part
  bool adds_ = false;     // `partial_` is added to `reduced_` (earlier backwards' sums)
  bool gathers_ = false;  // the reduction gathers the parts of all ranks, too
  std::shared_ptr<Reduction> reduction_;
  WorkPtr whole_;  // the gather behind it

  // A gradient that was handed to the process group. That frees it when all ranks have read it.
  struct Sent {
    explicit Sent(const at::Tensor& tensor)
        : memory(tensor.storage().getWeakStorageImpl()),
          nbytes(static_cast<int64_t>(tensor.nbytes())) {}
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    int64_t nbytes;
  };
  std::vector<Sent> sent_;  // while a memory watch is active
};

/// Those of all units of a model.
using AllGradients = std::vector<std::shared_ptr<UnitGradients>>;

/// The gradients of a unit that Tessera does not reduce: they stay whole in `.grad`, and
/// `reduced()` is a view of this rank's part. Nothing is sent, nothing is copied unless a
/// gradient's strides differ from its parameter's, and ranks need not agree on which parameters
/// have a gradient.
class GivenGradients final : public UnitGradients {
 public:
  explicit GivenGradients(Unit& unit)
      : UnitGradients(unit, nullptr, /*scale=*/1, /*predivide=*/1) {}

  void clear(size_t slot) override;
  void clear_all() override;
  void zero(size_t slot) override;
  void zero_all() override;
  bool is_live(size_t slot) const override;
  at::Tensor reduced(int64_t begin, int64_t end) const override;
};

}  // namespace tessera
