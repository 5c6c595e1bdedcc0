#include "engine/model/full_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/tensor/dist_tensor.h>

#include <algorithm>
#include <map>
#include <set>

#include "engine/unit/agreement.h"
#include "engine/unit/note_write.h"

namespace tessera {
namespace {

using Values = std::map<std::string, at::Tensor>;

// Copies this rank's part of a parameter.
void set_part(const Unit& unit, const ParamSlot& slot, const at::Tensor& value) {
  const auto [begin, end] = unit.updated_range(slot);
  if (begin == end) return;
  unit.updated()
      .narrow(0, begin - unit.updated_begin(), end - begin)
      .copy_(flat_in_order(local_value(slot, value.detach()), slot.strides)
                 .narrow(0, begin - slot.offset, end - begin));
}

// Throws unless `values` are those of the model's tensors, and all of them if `strict`.
void check_values(const ShardedState& state, const Values& values, bool strict) {
  std::vector<std::string> errors;
  std::set<std::string> known;
  const auto check = [&](const std::string& name, at::IntArrayRef sizes) {
    known.insert(name);
    const auto it = values.find(name);
    if (it == values.end()) {
      if (strict) errors.push_back(fmt::format("'{}' is missing", name));
    } else if (!it->second.defined() || it->second.sizes() != sizes) {
      errors.push_back(fmt::format("'{}' must have the shape [{}]", name, fmt::join(sizes, ", ")));
    }
  };
  for (const auto& unit : state.units()) {
    for (const ParamSlot& slot : unit->layout().slots)
      for (const std::string& name : slot.names) check(name, slot.global_sizes());
  }
  for (const NamedTensor& buffer : state.buffers().all()) check(buffer.name, buffer.tensor.sizes());
  for (const auto& [name, value] : values) {
    if (strict && !known.contains(name))
      errors.push_back(fmt::format("'{}' is not in the model", name));
  }
  TORCH_CHECK_VALUE(errors.empty(), "[load_full_state] the state must be that of the model; ",
                    fmt::format("{}", fmt::join(errors, ", ")));
}

}  // namespace

void ShardedState::visit_whole_units(const std::function<void(const Unit&)>& visit) {
  check_no_join("gathering the whole model");
  take_in_replaced();
  residency_->free_everything();  // so that all ranks gather the same units
  for (const auto& unit : units_) {
    const bool was_sharded = unit->state() == Unit::State::kSharded;
    if (was_sharded) unit->unshard();
    unit->wait();
    visit(*unit);
    if (was_sharded && unit->frees()) unit->reshard();
  }
}

at::Tensor gather_whole(ShardedState& state, const ParamIndex& place, const at::Tensor& part) {
  const UnitLayout& layout = state.units()[place.unit]->layout();
  const ParamSlot& param = state.slot(place);
  const auto begin = state.units()[place.unit]->updated_range(param).first - param.offset;
  const at::Tensor flat = at::empty({param.numel}, part.options());
  const at::Tensor own = flat.narrow(0, begin, part.numel()).copy_(part);
  if (layout.level != ShardLevel::kNone) {
    std::vector<int64_t> bounds;
    for (const int64_t bound : layout.bounds)
      bounds.push_back(overlap(param, bound, bound).first - param.offset);
    const auto work = state.units()[place.unit]->mesh().shard().all_gather(
        flat, own, bounds, {layout.name, Channel::kControl});
    work->wait();
    work->wait_inputs();
  }
  return global_value(param, at::as_strided(flat, param.sizes, param.strides, 0));
}

at::Tensor full_value(ShardedState& state, const ParamIndex& place) {
  at::NoGradGuard no_grad;
  state.check_no_join("full_value()");
  state.take_in_replaced();
  const Unit& unit = *state.units()[place.unit];
  const auto [begin, end] = unit.updated_range(state.slot(place));
  const int64_t first = begin < end ? begin - unit.updated_begin() : 0;
  return gather_whole(state, place,
                      unit.updated().narrow(0, first, end - begin).to(unit.layout().device));
}

at::Tensor gather_part(ShardedState& state, const ParamIndex& place, const at::Tensor& part) {
  at::NoGradGuard no_grad;
  state.check_no_join("gather()");
  const ParamSlot& param = state.slot(place);
  const Unit& unit = *state.units()[place.unit];
  const auto [begin, end] = unit.updated_range(param);
  TORCH_CHECK_VALUE(part.numel() == end - begin, "[gather] this rank has ", end - begin,
                    " elements of '", param.name(), "'; got ", part.numel());
  return gather_whole(state, place, flat_part(param, part).to(unit.layout().device));
}

at::Tensor cut_part(const ShardedState& state, const ParamIndex& place, const at::Tensor& whole,
                    const char* function) {
  at::NoGradGuard no_grad;
  const ParamSlot& param = state.slot(place);
  TORCH_CHECK_VALUE(whole.sizes() == at::IntArrayRef(param.global_sizes()), "[", function,
                    "] a tensor for '", param.name(), "' must have its shape ",
                    at::IntArrayRef(param.global_sizes()), "; got ", whole.sizes());
  const Unit& unit = *state.units()[place.unit];
  const auto [begin, end] = unit.updated_range(param);
  if (begin == end) return at::empty({0}, whole.options());
  const at::Tensor part = flat_in_order(local_value(param, whole), param.strides)
                              .narrow(0, begin - param.offset, end - begin)
                              .clone();
  return shaped_part(param, part);
}

std::vector<NamedTensor> full_state(ShardedState& state) {
  at::NoGradGuard no_grad;
  Values values;
  state.visit_whole_units([&](const Unit& unit) {
    for (const ParamSlot& slot : unit.layout().slots) {
      const at::Tensor value = global_value(slot, view_param(slot, unit.full())).clone();
      for (const std::string& name : slot.names) values[name] = value;
    }
  });
  std::vector<NamedTensor> full;
  for (const std::string& name : state.parameter_names()) full.push_back({name, values[name]});
  for (const auto& [name, buffer] : state.buffers().all())
    full.push_back({name, (is_dist(buffer) ? full_tensor(buffer) : buffer).clone()});
  return full;
}

void load_full_state(ShardedState& state, const std::vector<NamedTensor>& given, bool strict) {
  at::NoGradGuard no_grad;
  state.check_no_join("load_full_state()");
  state.check_not_exchanged("load_full_state");
  state.take_in_replaced();
  Values values;
  for (const NamedTensor& item : given) values[item.name] = item.tensor;
  check_on_all_ranks(state.mesh(), [&] { check_values(state, values, strict); });
  std::vector<std::string> hashes;  // not of buffers: these are each rank's own
  for (const std::string& name : state.parameter_names()) {
    const auto it = values.find(name);
    if (it != values.end() && !is_dist(it->second))
      hashes.push_back(fmt::format("'{}' with values of hash {}", name, hash_of(it->second)));
  }
  check_same_lines(state.mesh(), hashes,
                   "[load_full_state] the values must be the same on all ranks");
  state.overwrite([&] {
    for (const auto& unit : state.units()) {
      for (const ParamSlot& slot : unit->layout().slots) {
        const auto given = std::find_if(slot.names.begin(), slot.names.end(),
                                        [&](const auto& name) { return values.contains(name); });
        if (given != slot.names.end()) set_part(*unit, slot, values[*given]);
      }
    }
    for (const NamedTensor& buffer : state.buffers().all()) {
      if (values.contains(buffer.name)) buffer.tensor.copy_(values[buffer.name]);
    }
  });
}

std::vector<std::pair<Unit*, const ParamSlot*>> ShardedState::replaced() const {
  std::vector<std::pair<Unit*, const ParamSlot*>> replaced;
  for (const auto& unit : units_)
    for (const ParamSlot& slot : unit->layout().slots)
      if (unit->views().replacement(slot).defined()) replaced.emplace_back(unit.get(), &slot);
  return replaced;
}

void ShardedState::take_in_replaced() {
  residency_->end_evaluation();
  const auto replaced = this->replaced();
  const at::Tensor any = at::full({1}, !replaced.empty(), at::kByte);
  if (mesh().size() > 1)
    mesh().all_reduce(any, ReduceOp::kMax, {"parameters with other data", Channel::kControl});
  if (any.item<uint8_t>() == 0) return;
  std::string names;
  for (const auto& [unit, slot] : replaced) names += fmt::format("'{}' ", slot->name());
  const auto all =
      mesh().all_gather_bytes(names, {"parameters with other data", Channel::kControl});
  for (size_t rank = 0; rank < all.size(); ++rank)
    TORCH_CHECK_VALUE(
        all[rank] == all[0],
        "[tessera] all ranks must give the same parameters other data (by set_data(), "
        "torch::load() or Module::to()) after they were sharded; rank 0 has given it to [ ",
        all[0], "], rank ", rank, " to [ ", all[rank], "]");
  check_on_all_ranks(mesh(), [&] {
    for (const auto& [unit, slot] : replaced) unit->views().check_replacement(*slot);
  });
  at::NoGradGuard no_grad;
  for (const auto& [unit, slot] : replaced) note_write(*slot);
  set_shards([&] {
    for (const auto& [unit, slot] : replaced) unit->take_in(*slot, shared_from_this());
  });
}

void ShardedState::check_not_exchanged(const char* what) const {
  TORCH_CHECK(!is_exchanged(), "[", what,
              "] the model has the values of an ExponentialAverage, and what is written now would "
              "be lost when it gets its own back: call swap() of the average first");
}

void ShardedState::overwrite(const std::function<void()>& write, bool to_stay) {
  for (const auto& unit : units_)
    for (const ParamSlot& slot : unit->layout().slots) note_write(slot);
  set_shards(write, to_stay);
}

void ShardedState::set_shards(const std::function<void()>& write, bool to_stay) {
  if (to_stay) ++overwrites_;
  end_reading();
  write();
  for (const auto& unit : units_) unit->publish();
  residency_->on_step(std::vector<bool>(units_.size(), true));
}

}  // namespace tessera
