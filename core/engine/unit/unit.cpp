#include "engine/unit/unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/group/encoding.h"
#include "engine/unit/lost_step.h"

namespace tessera {
namespace {

// A unit may be gathered again before slow peers have read our shard for the last gathers.
constexpr size_t kMostUnread = 4;

// Returns the names of the unit's parameters for a message; of many, the first.
std::string names_in(const UnitLayout& layout) {
  constexpr size_t kMostNamed = 16;
  std::string text;
  for (size_t i = 0; i < std::min(layout.slots.size(), kMostNamed); ++i)
    text += fmt::format("{}'{}'", i > 0 ? ", " : "", layout.slots[i].name());
  return layout.slots.size() > kMostNamed ? text + ", ..." : text;
}

}  // namespace

Unit::Unit(UnitLayout layout, int index, UnitContext& context, UseListener& listener)
    : layout_(std::move(layout)),
      index_(index),
      context_(context),
      listener_(listener),
      label_(fmt::format("unit '{}'", layout_.name)),
      memory_(make_unit_memory(layout_, context)),
      views_(*this, layout_) {}

void Unit::show() const {
  const int ranks = mesh().shard().size();
  if (state_ == State::kUnsharded || ranks == 1) return views_.show(memory_->shown());
  if (!views_.any()) return;
  views_.show(at::Tensor(),
              fmt::format("[tessera] the parameters of {} ({}) are sharded over {} ranks and "
                          "not gathered now, so their memory can't be read by data_ptr(). Use "
                          "them through operators, which gather them, or hold "
                          "ShardedModule::keep_unsharded() while you read; to read them in code "
                          "of torch.compile, give it backend=tessera.inductor",
                          label_, names_in(layout_), ranks));
}

void Unit::thaw() {
  if (layout_.thawed_dtype == layout_.master_dtype) return;
  at::NoGradGuard no_grad;
  wait_until_unread();
  const auto offload = master_.is_offloaded() ? context_.offload : nullptr;
  layout_.master_dtype = layout_.thawed_dtype;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(layout_.master_dtype));
  if (offload) offload->reserve({updated().numel() * itemsize});
  master_.make(updated(), layout_.master_dtype, offload);
  for (ParamSlot& slot : layout_.slots) slot.master_dtype = layout_.thawed_dtype;
}

void Unit::bring_back() {
  at::NoGradGuard no_grad;
  wait_until_unread();  // a gather may still send from the old copy
  master_.bring_back(layout_.device);
}

at::Tensor Unit::shard_of(const at::Tensor& flat) const {
  return flat.narrow(0, layout_.bounds[rank()], layout_.shard_numel(rank()));
}

// The part of `flat` that this rank updates.
at::Tensor Unit::updated_of(const at::Tensor& flat) const {
  return flat.narrow(0, updated_begin(), updated_end() - updated_begin());
}

// This rank's shard for a gather, on the device and in the dtype that the gather fills.
at::Tensor Unit::gather_source() const {
  const at::Tensor& own = shard_.defined() ? shard_ : master_.values();
  // A shard has been rounded by the scales of its blocks already.
  const bool rounds = arriving_.defined() || (layout_.quantizes() && !shard_.defined());
  const at::Tensor values = rounds ? rounded(own) : own;
  return values.to(layout_.options().dtype(gathered().scalar_type()), /*non_blocking=*/true);
}

WorkPtr Unit::start_gather() const {
  Encoding encoding = layout_.gather_encoding;
  // Ranks of a host share the rounded values; only messages between hosts are narrow.
  if (is_shared() && layout_.dtype == at::kFloat && layout_.gather_dtype != layout_.dtype)
    encoding = rounding_encoding(layout_.gather_dtype);
  const std::string& name = write_.is_last ? write_.name : layout_.name;
  return mesh().shard().all_gather(gathered(), gather_source(), layout_.bounds,
                                   {name, Channel::kParams}, encoding);
}

// Waits until the host may change the values of an offloaded master copy.
void Unit::wait_for_upload() {
  if (uploaded_) uploaded_->synchronize();
  uploaded_.reset();
}

// New values of this rank's shard as all ranks are to use them.
at::Tensor Unit::rounded(const at::Tensor& values) const {
  if (layout_.quantizes())
    return rounded_by(layout_.gather_encoding, values.to(layout_.dtype).contiguous());
  return layout_.rounds() ? values.to(layout_.gather_dtype) : values;
}

// Returns all ranks' shards, rounded so.
at::Tensor Unit::rounded_shards(const at::Tensor& values) const {
  if (!layout_.quantizes()) return rounded(values);
  const at::Tensor result = at::empty_like(values, layout_.options());
  for (size_t r = 0; r + 1 < layout_.bounds.size(); ++r) {
    const int64_t begin = layout_.bounds[r], numel = layout_.bounds[r + 1] - begin;
    result.narrow(0, begin, numel).copy_(rounded(values.narrow(0, begin, numel)));
  }
  return result;
}

// Returns elements [begin, end) of the flat buffer, rounded so. This rank must update them.
at::Tensor Unit::shown(int64_t begin, int64_t end) const {
  const auto part = [&, first = updated_begin()](const at::Tensor& values) {
    return values.narrow(0, begin - first, end - begin);
  };
  return layout_.quantizes() ? part(rounded(updated())) : rounded(part(updated()));
}

void Unit::publish() {
  if (!master_.exists()) return;
  at::NoGradGuard no_grad;
  // A gather that nothing has used would copy the values of the last step over these.
  if (arriving_.defined()) wait();
  const at::Tensor shard = memory_->holds_shard() ? updated_of(full()) : shard_;
  if (!shard.defined()) return;
  shard.copy_(rounded(master_.values()), /*non_blocking=*/true);
  if (!is_uploaded()) return;
  uploaded_.emplace(layout_.device.type());
  uploaded_->record(current_stream(layout_.device));
}

int64_t Unit::resident_nbytes() const {
  // Where the ranks of a host have one copy, each counts its shard.
  if (!is_shared() && !frees()) return layout_.nbytes();
  return shard_.defined() ? static_cast<int64_t>(shard_.nbytes()) : 0;
}

int64_t Unit::gathered_nbytes() const {
  int64_t nbytes = memory_->gathered_nbytes();
  for (const at::Tensor* tensor : {&arriving_, &write_.values}) {
    if (tensor->defined()) nbytes += static_cast<int64_t>(tensor->nbytes());
  }
  return nbytes;
}

void Unit::unshard() {
  if (mesh().shard().size() == 1) {
    state_ = State::kUnsharded;
    return;
  }
  wait();
  check_in_step(context_, "gather", label_);
  context_.watch.before_change();
  try {
    begin_gather();
  } catch (...) {
    arriving_.reset();
    memory_->free();
    rethrow_as_lost(context_, fmt::format("gather {} ({} bytes)", label_, layout_.nbytes()));
  }
  if (!computes_on_host(layout_.device)) ++context_.unchecked_gathers;
  state_ = State::kUnsharding;
  write_.is_last = false;
  if (unread_.size() > kMostUnread) {
    unread_.front()->wait_inputs();
    unread_.erase(unread_.begin());
  }
  context_.watch.tell(MemoryEvent::kGatherStarted, layout_.name);
}

void Unit::begin_gather() {
  memory_->allocate();
  // Shared memory has the rounded values already.
  if (layout_.gather_dtype != layout_.dtype && !is_shared())
    arriving_ = at::empty({layout_.numel()}, layout_.options().dtype(layout_.gather_dtype));
  if (!shard_.defined() && is_uploaded()) {
    // The gather sends the copy on the device. It is made beside the kernels that come next.
    uploaded_ = context_.copies->of(layout_.device).run([&] { gather_ = start_gather(); });
  } else {
    gather_ = start_gather();
    unread_.push_back(gather_);
  }
}

void Unit::wait() {
  if (state_ != State::kUnsharding) return;
  gather_->wait();
  gather_.reset();
  context_.watch.before_change();
  if (arriving_.defined()) {
    at::NoGradGuard no_grad;
    full().copy_(std::exchange(arriving_, at::Tensor()));
  }
  state_ = State::kUnsharded;
  show();
  context_.watch.tell(MemoryEvent::kUnitGathered, layout_.name);
}

void Unit::reshard() {
  wait();
  state_ = State::kSharded;
  const bool was_there = memory_->gathered_nbytes() > 0;
  if (was_there) context_.watch.before_change();
  memory_->free();
  if (was_there) context_.watch.tell(MemoryEvent::kUnitFreed, layout_.name);
  if (context_.offload && frees()) context_.offload->rest();
  // A raw read of old values would be as wrong as one of freed memory.
  if (mesh().shard().size() > 1) show();
}

void Unit::begin_write() {
  if (!views_.any()) return;
  if (is_shared()) {
    write_.values = full().clone();  // other ranks would see writes to the buffer itself
    views_.show(write_.values);
    return;
  }
  // Peers may be reading this rank's shard: from the buffer, or as a tensor that `write_back()`
  // changes.
  wait_until_unread();
  if (layout_.has_master()) write_.before = updated_of(full()).clone();
}

void Unit::cancel_write() {
  write_.before.reset();
  if (!write_.values.defined()) return;
  write_.values.reset();
  show();
}

void Unit::write_back() {
  wait();
  at::NoGradGuard no_grad;
  memory_->wait_for_readers();
  if (write_.values.defined()) {
    keep_written(updated_of(full()), updated_of(write_.values));
    updated_of(full()).copy_(rounded(updated_of(write_.values)));
    write_.values.reset();
  } else {
    if (frees() && shard_.defined()) shard_.copy_(shard_of(full()));
    keep_written(std::exchange(write_.before, at::Tensor()), updated_of(full()));
  }
  if (layout_.quantizes()) publish();  // a value changes the scale of its neighbours
  if (write_.name.empty()) write_.name = name_after_write(layout_);
  write_.is_last = true;
  reshard();
}

// Brings the written values into the master copy.
void Unit::keep_written(const at::Tensor& before, const at::Tensor& after) {
  if (!master_.exists()) return;
  wait_for_upload();
  if (layout_.has_master()) {
    master_.take_changed(before, after);
  } else {
    master_.values().copy_(after);
  }
}

void Unit::wait_until_unread() {
  for (const WorkPtr& work : unread_) work->wait_inputs();
  unread_.clear();
  wait_for_upload();
}

const at::Tensor& Unit::updated() const {
  if (master_.exists()) return master_.values();
  return layout_.level == ShardLevel::kNone ? full() : shard_;
}
int64_t Unit::updated_begin() const {
  return layout_.level == ShardLevel::kNone ? 0 : layout_.bounds[rank()];
}
int64_t Unit::updated_end() const {
  return layout_.level == ShardLevel::kNone ? layout_.numel() : layout_.bounds[rank() + 1];
}

}  // namespace tessera
