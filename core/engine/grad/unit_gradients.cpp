#include "engine/grad/unit_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "base/device/device.h"
#include "base/device/side_stream.h"
#include "base/dispatch/math_bits.h"
#include "comm/group/encoding.h"
#include "engine/grad/grad_gate.h"

namespace tessera {

// [Note: The way of a gradient]
//
// Autograd makes a whole local gradient and hands it over (`arrive`). A large one is kept as it is:
// its memory is the message, nothing is copied. Small ones are copied side by side into one buffer,
// because a message costs more than the copy. The layout cuts the flat buffer into such chunks,
// equally on all ranks. `launch` reduce-scatters the chunks and stores the scaled sum over ranks in
// `reduced_`, the only buffer that stays (1/N of the unit; all of it at ShardLevel::kNone). With a
// replicate dim, `Reduction::replicate` then adds up the replicas' parts. Several units may be
// reduced in one collective: see grad_bucket.cpp. A further backward before the step is added to
// `reduced_`. A parameter without a gradient on this rank counts as zeros; one without a gradient
// on any rank has none (`live`), so the optimizer leaves it alone, as in one process.
namespace {

// Returns the elements of `grad` in memory order. Autograd lays gradients out like their parameter.
at::Tensor flat_view(const at::Tensor& grad) {
  return at::as_strided(grad, {grad.numel()}, {1}, grad.storage_offset());
}

// Returns the gradient of a parameter; undefined if it has none. It is laid out like the parameter,
// so that its elements can be changed in place. If tensors share memory, the first holds the
// sum.
at::Tensor gradient_of(const ParamSlot& slot) {
  const at::Tensor first = slot.tensor();
  if (!first.defined()) return {};
  at::NoGradGuard no_grad;
  at::Tensor& gradient = first.mutable_grad();
  for (size_t i = 1; i < slot.handles.size(); ++i) {
    at::Tensor& other = slot.tensor(i).mutable_grad();
    if (!other.defined()) continue;
    gradient = gradient.defined() ? with_plain_memory(gradient).add_(other) : other;
    other.reset();
  }
  gradient = with_plain_memory(gradient);
  if (gradient.defined() && gradient.strides() != at::IntArrayRef(slot.strides))
    gradient = flat_in_order(gradient, slot.strides).as_strided(slot.sizes, slot.strides);
  return gradient;
}

// Calls `f` with each gradient of the parameter's tensors.
template <class F>
void for_each_gradient(const ParamSlot& slot, F&& f) {
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor tensor = slot.tensor(i);
    if (tensor.defined() && tensor.grad().defined()) f(tensor.mutable_grad());
  }
}

// Calls `f` with the tensors of a parameter that have a gradient in `.grad`, behind the gate: one
// that the user set, or, where Tessera does not reduce, any.
template <class F>
void for_each_given(const ParamSlot& slot, F&& f) {
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor tensor = slot.tensor(i);
    if (tensor.defined() && holds_gradient(tensor)) f(tensor);
  }
}

}  // namespace

Reduction::Reduction(const ShardMesh& mesh, const at::Tensor& out, std::vector<Piece> pieces,
                     std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                     std::string_view subject)
    : mesh_(mesh),
      out_(out),
      subject_(subject),
      work_(mesh.shard().reduce_scatter(out, std::move(pieces), bounds, options,
                                        {subject, Channel::kGrads})) {}

void Reduction::replicate() {
  const auto add_replicas = [this] {
    return mesh_.replicate().all_reduce(out_, ReduceOp::kSum, {subject_, Channel::kGrads});
  };
  if (computes_on_host(out_.device())) {
    work_->wait();
    work_ = add_replicas();
    return;
  }
  // The stream of backward's kernels must not wait for the first sum.
  first_ = std::move(work_);
  SideStream(out_.device()).run([&] {
    first_->wait();
    work_ = add_replicas();
  });
}

void Reduction::wait() {
  work_->wait();
  first_.reset();
}

at::Tensor memory_for_sums(const UnitLayout& layout, int64_t numel) {
  const at::Tensor sums = at::empty({numel}, layout.options().dtype(layout.master_dtype));
  const bool are_sent = layout.level == ShardLevel::kNone;
  return are_sent && layout.reduce_encoding != Encoding::kPlain ? sums.zero_() : sums;
}

UnitGradients::UnitGradients(Unit& unit, GradientSink* sink, double scale, double predivide)
    : unit_(unit),
      sink_(sink),
      scale_(scale),
      predivide_(predivide),
      chunks_(unit.layout().chunks.size()),
      slots_(unit.layout().slots.size()) {
  if (unit.layout().error_feedback) error_ = std::make_shared<at::Tensor>();
}

// The chunk of a parameter that has elements.
size_t UnitGradients::chunk_of(size_t slot) const {
  const auto& chunks = unit_.layout().chunks;
  return std::ranges::upper_bound(chunks, slot, {}, &GradChunk::first_slot) - chunks.begin() - 1;
}

at::Tensor UnitGradients::place_of(size_t slot) {
  const UnitLayout& layout = unit_.layout();
  const ParamSlot& param = layout.slots[slot];
  const GradChunk& range = layout.chunks[chunk_of(slot)];
  at::Tensor& buffer = chunks_[chunk_of(slot)];
  if (!buffer.defined())
    buffer = at::zeros({range.end - range.begin}, layout.options().dtype(layout.reduce_dtype));
  return at::as_strided(buffer, param.sizes, param.strides,
                        buffer.storage_offset() + param.offset - range.begin);
}

void UnitGradients::begin_backward() {
  const auto& slots = unit_.layout().slots;
  for (size_t slot = 0; slot < slots.size(); ++slot)
    slots_[slot].seen.assign(slots[slot].handles.size(), false);
}

void UnitGradients::arrive(size_t slot, size_t handle, const at::Tensor& grad) {
  const ParamSlot& param = unit_.layout().slots[slot];
  TORCH_CHECK_NOT_IMPLEMENTED(
      !grad.is_sparse(), "[tessera] the gradient of parameter '", param.name(),
      "' must be dense; got a sparse one (an embedding with sparse = true?)");
  TORCH_CHECK_NOT_IMPLEMENTED(!grad.requires_grad(), "[tessera] the gradient of parameter '",
                              param.name(),
                              "' requires a gradient itself (create_graph = true); sharded "
                              "gradients can't be differentiated again");
  TORCH_CHECK_VALUE(grad.sizes() == at::IntArrayRef(param.sizes),
                    "[tessera] the gradient of parameter '", param.name(),
                    "' must have the parameter's shape; expected ", at::IntArrayRef(param.sizes),
                    ", got ", grad.sizes(), " (set by a hook, or by hand?)");
  slots_[slot].arrived = slots_[slot].seen[handle] = true;
  slots_[slot].zero = false;
  if (param.numel == 0) return;
  at::NoGradGuard no_grad;
  const MemoryWatch& watch = unit_.context().watch;
  watch.before_change();
  const size_t chunk = chunk_of(slot);
  const bool is_message = unit_.layout().chunks[chunk].is_single() && !chunks_[chunk].defined() &&
                          grad.strides() == param.strides && !has_math_bits(grad);
  if (is_message) {
    chunks_[chunk] = predivided(flat_view(grad)).to(unit_.layout().reduce_dtype);
  } else {
    place_of(slot).add_(predivided(grad));
  }
  watch.tell(MemoryEvent::kGradientMade, unit_.layout().name);
}

// Divides before a gradient is rounded to a narrower dtype for sending, and after it was widened to
// a wider one. Autograd's own tensor may be used elsewhere, too, and is not changed.
at::Tensor UnitGradients::predivided(const at::Tensor& grad) const {
  if (predivide_ == 1) return grad;
  const at::ScalarType sent = unit_.layout().reduce_dtype;
  const bool widens = c10::elementSize(sent) > c10::elementSize(grad.scalar_type());
  return (widens ? grad.to(sent) : grad).div(predivide_);
}

bool UnitGradients::is_complete() const {
  const auto& slots = unit_.layout().slots;
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    for (size_t handle = 0; handle < slots[slot].handles.size(); ++handle) {
      if (slots_[slot].seen[handle]) continue;
      const at::Tensor tensor = slots[slot].tensor(handle);
      if (tensor.defined() && tensor.requires_grad()) return false;
    }
  }
  return true;
}

bool UnitGradients::any_arrived() const { return std::ranges::any_of(slots_, &SlotState::arrived); }

// Drops gradients that have arrived and were not launched.
void UnitGradients::drop_arrivals() {
  std::fill(chunks_.begin(), chunks_.end(), at::Tensor());
  for (SlotState& slot : slots_) slot.arrived = false;
}

std::vector<Piece> UnitGradients::take_pieces() {
  std::erase_if(sent_, [](const Sent& sent) { return sent.memory.expired(); });
  const bool is_watched = unit_.context().watch.is_active();
  std::vector<Piece> pieces;
  for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    const GradChunk& range = unit_.layout().chunks[chunk];
    if (is_watched && chunks_[chunk].defined()) sent_.emplace_back(chunks_[chunk]);
    pieces.push_back({range.begin, std::move(chunks_[chunk]), range.end - range.begin});
  }
  drop_arrivals();
  return pieces;
}

// Allocates the result; returns true if the reduction is to be added to earlier gradients.
bool UnitGradients::prepare_reduced() {
  const UnitLayout& layout = unit_.layout();
  if (!any_live()) {
    const int64_t numel = unit_.updated_end() - unit_.updated_begin();
    // From the heap, whose memory activations use while there are no gradients.
    if (!reduced_.defined()) reduced_ = memory_for_sums(layout, numel);
    return false;
  }
  for (size_t slot = 0; slot < layout.slots.size(); ++slot) {
    if (slots_[slot].live) continue;
    const auto [begin, end] = unit_.updated_range(layout.slots[slot]);
    if (begin < end) reduced(begin, end).zero_();
  }
  return true;
}

// Returns this rank's part of the sum over the shard dim, also where every rank keeps everything.
at::Tensor UnitGradients::shard_part() const {
  const int rank = unit_.mesh().shard().rank();
  const auto& bounds = unit_.layout().bounds;
  return reduced(bounds[rank], bounds[rank + 1]);
}

// At ShardLevel::kNone every rank keeps everything. Returns true if the reduction itself may gather
// its result, so that this, too, is done while backward runs: always in the same place of the order
// of collectives, unlike a gather that a rank starts when it finds the reduction done.
bool UnitGradients::gathers_in_reduction() const {
  const ShardMesh& mesh = unit_.mesh();
  return unit_.layout().may_gather_sums() && !mesh.replicates() && mesh.shard().size() > 1 &&
         mesh.shard().transport().gathers_sums();
}

void UnitGradients::launch() {
  at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(!is_reducing());
  unit_.thaw();
  unit_.context().watch.before_change();
  const bool accumulate = prepare_reduced();
  const UnitLayout& layout = unit_.layout();
  const ShardMesh& mesh = unit_.mesh();
  // With replicas, the gradients of earlier backwards are summed over all of them already.
  const bool apart = accumulate && mesh.replicates();
  if (apart) partial_ = at::zeros_like(shard_part());
  adds_ = apart;
  gathers_ = gathers_in_reduction();
  reduction_ = std::make_shared<Reduction>(
      mesh, apart ? partial_ : shard_part(), take_pieces(), layout.bounds,
      ReduceScatterOptions{.scale = scale_,
                           .accumulate = accumulate && !apart,
                           .dtype = layout.reduce_dtype,
                           .encoding = layout.reduce_encoding,
                           .error = error_,
                           .gather_into = gathers_ ? reduced_ : at::Tensor()},
      layout.name);
  unit_.context().watch.tell(MemoryEvent::kReductionStarted, layout.name);
}

// Launches into a part of a buffer of several units: `reduced_` becomes a view of that part if it
// holds no more than this rank's part. Gradients of earlier backwards are copied into the buffer
// first, or (`apart`) stay where they are.
std::vector<Piece> UnitGradients::launch_into(const at::Tensor& part, bool apart) {
  TORCH_INTERNAL_ASSERT(!is_reducing());
  unit_.context().watch.before_change();
  gathers_ = false;
  const bool is_view = !apart && unit_.layout().level != ShardLevel::kNone;
  const bool has_earlier = any_live();
  if (has_earlier || !is_view) prepare_reduced();
  if (has_earlier && !apart && !shard_part().is_alias_of(part)) part.copy_(shard_part());
  if (is_view) {
    reduced_ = part;
  } else {
    partial_ = part;
    adds_ = apart && has_earlier;
  }
  std::vector<Piece> pieces = take_pieces();
  unit_.context().watch.tell(MemoryEvent::kReductionStarted, unit_.layout().name);
  return pieces;
}

// Waits for the reduction in flight, or for the gather behind it.
void UnitGradients::finish_reduction() {
  if (const WorkPtr gather = std::exchange(whole_, nullptr)) {
    reduction_.reset();
    gather->wait();
    gather->wait_inputs();
  } else {
    finish_sum();
    reduction_.reset();
  }
}

// Waits for the reduction in flight, and moves its result into `reduced_`.
void UnitGradients::finish_sum() {
  reduction_->wait();
  if (!partial_.defined()) return;
  at::NoGradGuard no_grad;
  adds_ ? shard_part().add_(partial_) : shard_part().copy_(partial_);
  partial_.reset();
}

void UnitGradients::start_gather() {
  ProcessGroup& process_group = unit_.mesh().shard();
  if (!is_reducing() || gathers_ || whole_ || unit_.layout().level != ShardLevel::kNone ||
      process_group.size() == 1)
    return;
  at::NoGradGuard no_grad;
  finish_sum();
  const bool sends = !process_group.sends_to().empty();
  const Encoding encoding = sends ? unit_.layout().reduce_encoding : Encoding::kPlain;
  // All ranks have the same gradients, the owner of a part included.
  if (encoding != Encoding::kPlain) {
    if (error_ && !gather_error_.defined())
      gather_error_ = at::zeros(shard_part().sizes(), shard_part().options().dtype(at::kFloat));
    shard_part().copy_(rounded_by(encoding, shard_part(), gather_error_));
  }
  whole_ = process_group.all_gather(reduced_, shard_part(), unit_.layout().bounds,
                                    {unit_.layout().name, Channel::kGrads}, encoding);
}

void UnitGradients::settle(const std::vector<bool>& used) {
  if (!is_reducing()) return;
  start_gather();
  finish_reduction();
  unit_.context().watch.before_change();
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (used[slot] && !slots_[slot].cleared) slots_[slot].live = true;
    slots_[slot].cleared = false;
  }
  if (!any_live()) reduced_.reset();
  unit_.context().watch.tell(MemoryEvent::kUnitReduced, unit_.layout().name);
}

bool UnitGradients::holds_any() const {
  return reduced_.defined() || std::any_of(chunks_.begin(), chunks_.end(),
                                           [](const auto& chunk) { return chunk.defined(); });
}

void UnitGradients::clear(size_t slot) {
  SlotState& own = slots_[slot];
  ++own.clears;
  const bool held = holds_any();
  if (held) unit_.context().watch.before_change();
  if (own.arrived) {
    own.arrived = false;
    if (unit_.layout().slots[slot].numel > 0) place_of(slot).zero_();
  }
  own.live = false;
  own.cleared = is_reducing();
  if (!any_live() && !is_reducing()) reduced_.reset();
  if (held && !holds_any())
    unit_.context().watch.tell(MemoryEvent::kGradientsCleared, unit_.layout().name);
}

void UnitGradients::clear_all() {
  for (SlotState& slot : slots_) ++slot.clears;
  const bool held = holds_any();
  if (held) unit_.context().watch.before_change();
  drop_arrivals();
  for (SlotState& slot : slots_) slot.live = slot.cleared = false;
  if (is_reducing()) finish_reduction();
  reduced_.reset();
  if (held) unit_.context().watch.tell(MemoryEvent::kGradientsCleared, unit_.layout().name);
}

// As after a backward that has made zeros: gradients count as arrived, without tensors.
void UnitGradients::zero_all() {
  std::vector<bool> any;
  for (size_t slot = 0; slot < slots_.size(); ++slot)
    any.push_back(has_arrived(slot) || is_live(slot));
  clear_all();
  for (size_t slot = 0; slot < slots_.size(); ++slot)
    slots_[slot].arrived = slots_[slot].zero = any[slot];
}

bool UnitGradients::has_gradient(size_t slot) const {
  bool has = is_live(slot) || has_arrived(slot);
  for_each_given(unit_.layout().slots[slot], [&](const at::Tensor&) { has = true; });
  return has;
}

void UnitGradients::zero_grad(size_t slot, bool set_to_none) {
  if (!set_to_none && has_gradient(slot)) return zero(slot);
  for_each_given(unit_.layout().slots[slot], take_gradient);
  clear(slot);
}

void UnitGradients::zero(size_t slot) {
  const ParamSlot& param = unit_.layout().slots[slot];
  for_each_given(param, take_gradient);
  if (!is_live(slot) || is_reducing()) {
    clear(slot);
    slots_[slot].arrived = slots_[slot].zero = true;
    return;
  }
  ++slots_[slot].clears;
  if (has_arrived(slot) && param.numel > 0) place_of(slot).zero_();
  const auto [begin, end] = unit_.updated_range(param);
  if (begin < end) reduced(begin, end).zero_();
}

bool UnitGradients::any_live() const {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (is_live(slot)) return true;
  }
  return false;
}

at::Tensor UnitGradients::reduced(int64_t begin, int64_t end) const {
  return reduced_.narrow(0, begin - unit_.updated_begin(), end - begin);
}

int64_t UnitGradients::nbytes() const {
  int64_t nbytes = reduced_.defined() ? static_cast<int64_t>(reduced_.nbytes()) : 0;
  for (const at::Tensor& error : {error_ ? *error_ : at::Tensor(), gather_error_})
    if (error.defined()) nbytes += static_cast<int64_t>(error.nbytes());
  return nbytes;
}

int64_t UnitGradients::in_flight_nbytes() const {
  int64_t nbytes = partial_.defined() ? static_cast<int64_t>(partial_.nbytes()) : 0;
  for (const at::Tensor& chunk : chunks_) {
    if (chunk.defined()) nbytes += static_cast<int64_t>(chunk.nbytes());
  }
  for (const Sent& sent : sent_) {
    if (!sent.memory.expired()) nbytes += sent.nbytes;
  }
  return nbytes;
}

void GivenGradients::clear(size_t slot) {
  for_each_gradient(unit().layout().slots[slot], [](at::Tensor& gradient) { gradient.reset(); });
}

void GivenGradients::clear_all() {
  for (size_t slot = 0; slot < unit().layout().slots.size(); ++slot) clear(slot);
}

void GivenGradients::zero(size_t slot) {
  at::NoGradGuard no_grad;
  for_each_gradient(unit().layout().slots[slot], [](at::Tensor& gradient) { gradient.zero_(); });
}

void GivenGradients::zero_all() {
  for (size_t slot = 0; slot < unit().layout().slots.size(); ++slot) zero(slot);
}

bool GivenGradients::is_live(size_t slot) const {
  return gradient_of(unit().layout().slots[slot]).defined();
}

at::Tensor GivenGradients::reduced(int64_t begin, int64_t end) const {
  const auto& slots = unit().layout().slots;
  const auto slot = std::find_if(slots.begin(), slots.end(), [&](const ParamSlot& candidate) {
    return candidate.offset <= begin && end <= candidate.offset + candidate.numel;
  });
  TORCH_INTERNAL_ASSERT(slot != slots.end());
  const at::Tensor gradient = gradient_of(*slot);
  return at::as_strided(gradient, {end - begin}, {1},
                        gradient.storage_offset() + begin - slot->offset);
}

}  // namespace tessera
