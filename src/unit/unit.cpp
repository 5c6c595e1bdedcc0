#include "unit/unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "group/capability.h"
#include "init/deferred_storage.h"

namespace tessera {
namespace {

// A unit may be gathered again before slow peers have read our shard for the last gathers.
constexpr size_t kMostUnread = 4;

c10::intrusive_ptr<UnitStorage> no_storage() { return {}; }

// The DistTensor of which `view` is this rank's part, in place of `old`.
at::Tensor dist_around(const at::Tensor& view, const DistSlot& slot, const at::Tensor& old) {
  const DistMeta* const meta = find_dist_meta(old);
  DistParameter parameter;
  if (meta && meta->parameter) parameter.name = meta->parameter->name;
  parameter.gradients = slot.gradients;
  return make_dist_parameter(view, slot.spec, slot.sizes, slot.strides,
                             std::make_shared<const DistParameter>(std::move(parameter)));
}

bool is_in_use(const ParamSlot& slot) {
  return std::any_of(slot.handles.begin(), slot.handles.end(),
                     [](const auto& handle) { return !handle.expired(); });
}

}  // namespace

Unit::Unit(UnitLayout layout, int index, UnitContext& context, UseListener& listener)
    : layout_(std::move(layout)),
      index_(index),
      context_(context),
      listener_(listener),
      rank_(context.mesh.shard().rank()),
      label_(fmt::format("unit '{}'", layout_.name)),
      storage_(no_storage()) {
  share_memory();
  // Alone, a rank's shard is everything: there is nothing to free.
  frees_ = layout_.level == ShardLevel::kParameters && context.mesh.shard().size() > 1 &&
           !(shared_ && shared_->stays_whole);
}

at::TensorOptions Unit::options() const {
  return at::TensorOptions().dtype(layout_.dtype).device(layout_.device);
}

// Where nothing is sharded, all ranks write to everything.
void Unit::share_memory() {
  if (layout_.level == ShardLevel::kNone || !layout_.device.is_cpu()) return;
  if (auto* const memory = capability<SharesMemory>(context_.mesh.shard()))
    shared_ = memory->share(layout_.nbytes(), {layout_.name, Channel::kControl});
}

// The flat buffer that lies in `bytes`.
at::Tensor Unit::flat_view(const at::Tensor& bytes) const {
  return bytes.narrow(0, 0, layout_.nbytes()).view(layout_.dtype);
}

void Unit::allocate_full() {
  if (!full_.defined()) full_ = at::empty({layout_.numel()}, options());
  count_unsharded(true);
}

void Unit::free_full() {
  if (!frees_) return;
  shared_ ? capability<SharesMemory>(context_.mesh.shard())->release(*shared_) : full_.reset();
  count_unsharded(false);
}

void Unit::count_unsharded(bool is_there) {
  if (!frees_ || counted_ == is_there) return;
  counted_ = is_there;
  context_.unsharded_bytes += is_there ? layout_.nbytes() : -layout_.nbytes();
  context_.peak_unsharded_bytes = std::max(context_.peak_unsharded_bytes, context_.unsharded_bytes);
}

void Unit::show_full() {
  auto storage = storage_.lock();
  if (!storage) return;  // all parameters of the unit are gone
  if (state_ == State::kUnsharded || context_.mesh.shard().size() == 1)
    return storage->show(shared_ ? flat_view(shared_->read_only) : full_, "");
  storage->show(at::Tensor(),
                fmt::format("[tessera] the parameters of unit '{}' are sharded over {} ranks and "
                            "not gathered now, so their memory can't be read by data_ptr(). Use "
                            "them through operators, which gather them, or hold "
                            "ShardedModule::keep_unsharded() while you read",
                            layout_.name, context_.mesh.shard().size()));
}

// The values of all parameters as they were made, flat. Rank 0's are sent to the others if
// `broadcast`: only it makes those of deferred parameters.
at::Tensor Unit::collect_values(bool broadcast) const {
  const at::Tensor values = at::empty({layout_.numel()}, options().dtype(layout_.master_dtype));
  values.zero_();  // the padding must have a value, too
  for (const ParamSlot& slot : layout_.slots) {
    if (broadcast && context_.mesh.rank() != 0) break;
    read_into(slot.local(), view_param(slot, values));
  }
  if (broadcast) context_.mesh.broadcast(values, {layout_.name, Channel::kControl});
  return values;
}

void Unit::adopt(const std::shared_ptr<void>& keep_alive, bool broadcast) {
  at::NoGradGuard no_grad;
  {
    const at::Tensor values = collect_values(broadcast);
    full_ = layout_.has_master() ? rounded(values).to(layout_.dtype) : values;
    install_views(keep_alive);
    if (shared_) move_to_shared_memory();
    keep_part_of(values);
  }
  if (frees_) {
    free_full();
    state_ = State::kSharded;
  }
  shared_ && !frees_ ? unshard() : show_full();
}

// Each rank writes its shard: what it was given is as everyone else's.
void Unit::move_to_shared_memory() {
  const at::Tensor shared = flat_view(shared_->bytes);
  shard_of(shared).copy_(shard_of(full_));
  full_ = shared;
  reshard();
}

void Unit::install_views(const std::shared_ptr<void>& keep_alive) {
  for (const ParamSlot& slot : layout_.slots) install_view(slot, keep_alive);
}

void Unit::install_view(const ParamSlot& slot, const std::shared_ptr<void>& keep_alive) {
  auto storage = storage_.lock();
  if (!storage) {
    storage = c10::make_intrusive<UnitStorage>(*this, keep_alive, layout_.nbytes(), layout_.device);
    storage_ = c10::weak_intrusive_ptr<UnitStorage>(storage);
  }
  point_to(slot, [&] {
    return make_unit_view(storage, slot.dtype, slot.sizes, slot.strides, slot.offset);
  });
}

// Makes the parameter's tensors views that `make_view` gives.
void Unit::point_to(const ParamSlot& slot, const std::function<at::Tensor()>& make_view) const {
  c10::impl::ExcludeDispatchKeyGuard not_a_use(kUnitKey);
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor tensor = slot.tensor(i);
    if (!tensor.defined()) continue;
    const at::Tensor view = make_view();
    tensor.set_data(slot.dist ? dist_around(view, *slot.dist, tensor) : view);
  }
}

void Unit::give_back(GivenValues which) {
  TORCH_CHECK_NOT_IMPLEMENTED(which == GivenValues::kUsed || layout_.master_dtype == layout_.dtype, "[tessera] ", label_,
                              " has master weights of another dtype, and can't be given back with them");
  at::NoGradGuard no_grad;
  if (state_ == State::kSharded) unshard();
  wait();
  if (!full_.defined()) return;  // it was, before another unit failed
  const at::Tensor values = values_to_give(which);
  for (const ParamSlot& slot : layout_.slots) {
    if (slot.local().defined() && unit_of(slot.local()) != this) {
      if (which == GivenValues::kUpdated) restore_taken_out(slot, values);
    } else if (is_in_use(slot)) {
      const at::Tensor own = view_param(slot, values).clone(at::MemoryFormat::Preserve);
      point_to(slot, [&] { return own.alias(); });
    }
  }
  if (const auto storage = storage_.lock()) storage->leave_unit(shared_ ? full_.clone() : full_);
  count_unsharded(false);
  for (at::Tensor* memory : {&full_, &shard_, &master_}) memory->reset();
}

at::Tensor Unit::values_to_give(GivenValues which) const {
  if (which == GivenValues::kUsed || !master_.defined()) return full_;
  const at::Tensor values = full_.clone();
  updated_of(values).copy_(master_);
  return values;
}

// The user has converted the parameter, and so its rounded values. Where those are all that it has,
// and its new dtype is rounded, too, this rank goes on from its own.
void Unit::restore_taken_out(const ParamSlot& slot, const at::Tensor& values) const {
  const at::Tensor taken = slot.local().detach();
  const auto [begin, end] = updated_range(slot);
  if (!layout_.rounds() || begin == end || taken.sizes() != at::IntArrayRef(slot.sizes) ||
      !taken.is_floating_point() ||
      c10::elementSize(taken.scalar_type()) <= c10::elementSize(layout_.gather_dtype)) {
    return;
  }
  const at::Tensor own = view_param(slot, values).to(taken.options());
  if (at::equal(rounded(own).to(taken.scalar_type()), taken)) taken.copy_(own);
}

// Makes the shard and the master copy, as far as this unit has them.
void Unit::keep_part_of(const at::Tensor& values) {
  const at::Tensor part = updated_of(values);
  is_offloaded_ = context_.offload != nullptr;
  if (is_offloaded_) {
    master_ = context_.offload->empty(part.numel(), part.scalar_type());
    master_.copy_(part);
  } else if (layout_.has_master()) {
    master_ = part.clone();
  }
  if (!frees_ || shared_) {
    shard_ = shard_of(full_);
  } else if (!master_.defined() || !(is_offloaded_ || context_.master_only)) {
    shard_ = shard_of(full_).clone();
  }
}

void Unit::thaw() {
  if (layout_.thawed_dtype == layout_.master_dtype) return;
  at::NoGradGuard no_grad;
  wait_until_unread();
  const at::Tensor& own = updated();
  const auto numel = own.numel();
  if (is_offloaded_)
    context_.offload->reserve({numel * int64_t(c10::elementSize(layout_.thawed_dtype))});
  const at::Tensor master = is_offloaded_
                                ? context_.offload->empty(numel, layout_.thawed_dtype)
                                : at::empty({numel}, options().dtype(layout_.thawed_dtype));
  master.copy_(own);
  master_ = master;
  layout_.master_dtype = layout_.thawed_dtype;
  for (ParamSlot& slot : layout_.slots) slot.master_dtype = layout_.thawed_dtype;
}

void Unit::bring_back() {
  TORCH_INTERNAL_ASSERT(is_offloaded_);
  at::NoGradGuard no_grad;
  wait_until_unread();  // a gather may still send from the old one
  const at::Tensor near = at::empty(master_.sizes(), options().dtype(master_.scalar_type()));
  near.copy_(master_);
  master_ = near;
  is_offloaded_ = false;
}

at::Tensor Unit::shard_of(const at::Tensor& flat) const {
  return flat.narrow(0, layout_.bounds[rank_], layout_.shard_numel(rank_));
}

// What `updated()` is the new value of.
at::Tensor Unit::updated_of(const at::Tensor& flat) const {
  return flat.narrow(0, updated_begin(), updated_end() - updated_begin());
}

// What this rank gives to a gather, in the dtype that it fills.
at::Tensor Unit::gather_source() const {
  const at::Tensor& own = shard_.defined() ? shard_ : master_;
  return arriving_.defined() ? rounded(own).to(layout_.device) : own.to(options());
}

// New values as all ranks are to use them.
at::Tensor Unit::rounded(const at::Tensor& values) const {
  return layout_.rounds() ? values.to(layout_.gather_dtype) : values;
}

void Unit::publish() {
  if (!master_.defined()) return;
  at::NoGradGuard no_grad;
  if (!frees_) {
    updated_of(full_).copy_(rounded(master_));
  } else if (shard_.defined()) {
    shard_.copy_(rounded(master_));
  }
}

int64_t Unit::resident_nbytes() const {
  // One copy for all ranks of the host: each counts its shard.
  if (shared_) return shard_.defined() ? static_cast<int64_t>(shard_.nbytes()) : 0;
  if (!frees_) return layout_.nbytes();
  return shard_.defined() ? static_cast<int64_t>(shard_.nbytes()) : 0;
}

int64_t Unit::gathered_nbytes() const {
  int64_t nbytes = counted_ ? layout_.nbytes() : 0;
  for (const at::Tensor* tensor : {&arriving_, &written_}) {
    if (tensor->defined()) nbytes += static_cast<int64_t>(tensor->nbytes());
  }
  return nbytes;
}

void Unit::unshard() {
  if (context_.mesh.shard().size() == 1) {
    state_ = State::kUnsharded;
    return;
  }
  wait();
  context_.watch.before_change();
  allocate_full();
  // Shared memory has the rounded values already.
  if (layout_.rounds() && !shared_)
    arriving_ = at::empty({layout_.numel()}, options().dtype(layout_.gather_dtype));
  gather_ =
      context_.mesh.shard().all_gather(arriving_.defined() ? arriving_ : full_, gather_source(),
                                       layout_.bounds, {layout_.name, Channel::kParams});
  state_ = State::kUnsharding;
  unread_.push_back(gather_);
  if (unread_.size() > kMostUnread) {
    unread_.front()->wait_inputs();
    unread_.erase(unread_.begin());
  }
  context_.watch.tell(MemoryEvent::kGatherStarted, layout_.name);
}

void Unit::wait() {
  if (state_ != State::kUnsharding) return;
  gather_->wait();
  gather_.reset();
  context_.watch.before_change();
  if (arriving_.defined()) {
    at::NoGradGuard no_grad;
    full_.copy_(std::exchange(arriving_, at::Tensor()));
  }
  state_ = State::kUnsharded;
  show_full();
  context_.watch.tell(MemoryEvent::kUnitGathered, layout_.name);
}

void Unit::reshard() {
  wait();
  state_ = State::kSharded;
  const bool was_there = counted_;
  if (was_there) context_.watch.before_change();
  free_full();
  if (was_there) context_.watch.tell(MemoryEvent::kUnitFreed, layout_.name);
  if (context_.offload && frees_) context_.offload->rest();
  // A raw read of old values would be as wrong as one of freed memory.
  if (context_.mesh.shard().size() > 1) show_full();
}

void Unit::begin_write() {
  const auto storage = storage_.lock();
  if (!storage) return;
  if (shared_) {
    written_ = full_.clone();
    storage->show(written_, "");
  } else if (layout_.has_master()) {
    before_write_ = updated_of(full_).clone();
  }
}

void Unit::cancel_write() {
  before_write_.reset();
  if (!written_.defined()) return;
  written_.reset();
  show_full();
}

void Unit::write_back() {
  wait();
  at::NoGradGuard no_grad;
  if (shared_) {
    // The others have read the old values when they have come as far as this.
    context_.mesh.shard().arrive({layout_.name, Channel::kControl})->wait();
    keep_written(updated_of(full_), updated_of(written_));
    updated_of(full_).copy_(rounded(updated_of(written_)));
    written_.reset();
  } else {
    if (frees_) wait_until_unread();
    if (frees_ && shard_.defined()) shard_.copy_(shard_of(full_));
    keep_written(std::exchange(before_write_, at::Tensor()), updated_of(full_));
  }
  reshard();
}

// Brings what was written into the master copy: where the value that is seen has changed, and
// nowhere else, as the master copy has bits that are not seen.
void Unit::keep_written(const at::Tensor& before, const at::Tensor& after) {
  if (!master_.defined()) return;
  if (!layout_.has_master()) {
    master_.copy_(after);
    return;
  }
  const at::Tensor is_new = after.ne(before).to(master_.device());
  master_.copy_(at::where(is_new, after.to(master_.options()), master_));
}

void Unit::wait_until_unread() {
  for (const WorkPtr& work : unread_) work->wait_inputs();
  unread_.clear();
}

const at::Tensor& Unit::updated() const {
  if (master_.defined()) return master_;
  return layout_.level == ShardLevel::kNone ? full_ : shard_;
}
int64_t Unit::updated_begin() const {
  return layout_.level == ShardLevel::kNone ? 0 : layout_.bounds[rank_];
}
int64_t Unit::updated_end() const {
  return layout_.level == ShardLevel::kNone ? layout_.numel() : layout_.bounds[rank_ + 1];
}

}  // namespace tessera
