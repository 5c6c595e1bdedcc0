// The parameters' values on their way from the user to the unit, and back.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/where.h>

#include "engine/unit/unit.h"
#include "init/deferred_storage.h"

namespace tessera {

// The values of all parameters as they were made, flat. Rank 0's are sent to the others if
// `broadcast`: only it makes those of deferred parameters.
at::Tensor Unit::collect_values(bool broadcast) const {
  const at::Tensor values =
      at::empty({layout_.numel()}, layout_.options().dtype(layout_.master_dtype));
  values.zero_();  // the padding must have a value, too
  for (const ParamSlot& slot : layout_.slots) {
    if (broadcast && mesh().rank() != 0) break;
    read_into(slot.local(), view_param(slot, values));
  }
  if (broadcast) mesh().broadcast(values, {layout_.name, Channel::kControl});
  return values;
}

void Unit::adopt(const std::shared_ptr<void>& keep_alive, bool broadcast) {
  at::NoGradGuard no_grad;
  {
    const at::Tensor values = collect_values(broadcast);
    views_.install(keep_alive);
    memory_->adopt(layout_.has_master() ? rounded_shards(values).to(layout_.dtype) : values);
    keep_part_of(values);
  }
  if (is_shared() || frees()) {
    memory_->free();
    state_ = State::kSharded;
  }
  show();  // also before a gather: a storage without memory must have a text that says why
  if (is_shared() && !frees()) unshard();
}

// Makes the shard and the master copy, as far as this unit has them.
void Unit::keep_part_of(const at::Tensor& values) {
  if (context_.offload || layout_.has_master())
    master_.make(updated_of(values), values.scalar_type(), context_.offload);
  if (memory_->holds_shard()) {
    shard_ = shard_of(full());
  } else if (!master_.exists() || !(master_.is_offloaded() || context_.master_only)) {
    shard_ = shard_of(full()).clone();
  }
}

void Unit::give_back(GivenValues which) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      which == GivenValues::kUsed || layout_.master_dtype == layout_.dtype, "[tessera] ", label_,
      " has master weights of another dtype, and can't be given back with them");
  at::NoGradGuard no_grad;
  if (state_ == State::kSharded) unshard();
  wait();
  if (!full().defined()) return;  // it was, before another unit failed
  const at::Tensor values = values_to_give(which);
  for (const ParamSlot& slot : layout_.slots) {
    if (which == GivenValues::kUpdated && views_.was_taken_out(slot))
      restore_taken_out(slot, values);
  }
  views_.give_back(values, is_shared() ? full().clone() : full());
  memory_->leave();
  shard_.reset();
  master_.reset();
}

at::Tensor Unit::values_to_give(GivenValues which) const {
  if (which == GivenValues::kUsed || !master_.exists()) return full();
  const at::Tensor values = full().clone();
  updated_of(values).copy_(master_.values());
  return values;
}

// The user has converted the parameter, and so its rounded values. Where those are all that it has,
// and its new dtype is rounded, too, this rank goes on from its own.
void Unit::restore_taken_out(const ParamSlot& slot, const at::Tensor& values) const {
  const at::Tensor taken = slot.local().detach();
  const auto [begin, end] = updated_range(slot);
  if (!layout_.rounds() || begin == end || taken.sizes() != at::IntArrayRef(slot.sizes) ||
      !taken.is_floating_point() ||
      c10::elementSize(taken.scalar_type()) <= c10::elementSize(layout_.rounded_dtype())) {
    return;
  }
  if (at::equal(view_param(slot, full()).to(taken.options()), taken))
    taken.copy_(view_param(slot, values));
}

// Elements whose value is the one that the parameter showed keep the bits that it does not show.
void Unit::take_in(const ParamSlot& slot, const std::shared_ptr<void>& keep_alive) {
  const at::Tensor tensor = views_.replacement(slot);
  if (!tensor.defined()) return;
  const auto [begin, end] = updated_range(slot);
  if (begin < end) {
    const at::Tensor part = flat_in_order(local_of(tensor).detach(), slot.strides)
                                .narrow(0, begin - slot.offset, end - begin);
    wait_for_upload();
    const at::Tensor own = updated().narrow(0, begin - updated_begin(), end - begin);
    const at::Tensor given = part.to(own.options());
    const at::Tensor seen = shown(begin, end).to(layout_.dtype).to(own.options());
    own.copy_(layout_.has_master() ? at::where(given.ne(seen), given, own) : given);
  }
  views_.install(slot, keep_alive);
  show();
}

}  // namespace tessera
