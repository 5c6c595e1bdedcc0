#include "engine/unit/layout.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <ranges>
#include <set>
#include <tuple>

#include "base/device/device.h"
#include "comm/group/encoding.h"
#include "comm/group/local_sum.h"
#include "engine/unit/placement.h"
#include "tensor/placed.h"
#include "tensor/redistribute.h"

namespace tessera {

namespace {

// Gradients below this are copied together: a message costs more than the copy.
constexpr int64_t kSmallGradBytes = int64_t{128} << 10;

int64_t nbytes_of(const ParamSlot& slot) {
  return slot.numel * static_cast<int64_t>(c10::elementSize(slot.dtype));
}

// Chooses the dtypes in which a parameter is used and is updated by the optimizer. A frozen
// parameter keeps the dtype that it was made with, so that no value is lost unless the plan says
// so; it gets a wider master copy when it is trained.
void choose_dtypes(ParamSlot& param, const Precision& precision) {
  param.master_dtype = param.thawed_dtype = param.dtype;
  if (!c10::isFloatingType(param.dtype)) return;
  const auto wider = [](at::ScalarType a, at::ScalarType b) {
    return c10::elementSize(b) > c10::elementSize(a) ? b : a;
  };
  const at::ScalarType used = precision.param_dtype.value_or(param.dtype);
  const at::ScalarType own = wider(param.dtype, used);
  param.thawed_dtype = wider(own, precision.master_dtype.value_or(own));
  param.master_dtype = param.requires_grad      ? param.thawed_dtype
                       : precision.round_frozen ? used
                                                : own;
  param.dtype = used;
}

void cut_chunks(UnitLayout& unit) {
  for (size_t i = 0; i < unit.slots.size(); ++i) {
    const ParamSlot& slot = unit.slots[i];
    if (slot.numel == 0) continue;
    const bool small = nbytes_of(slot) < kSmallGradBytes;
    GradChunk* last = unit.chunks.empty() ? nullptr : &unit.chunks.back();
    const bool last_is_small = last && nbytes_of(unit.slots[last->first_slot]) < kSmallGradBytes;
    if (small && last_is_small) {
      last->end = slot.offset + slot.numel;
      last->end_slot = i + 1;
    } else {
      unit.chunks.push_back({slot.offset, slot.offset + slot.numel, i, i + 1});
    }
  }
}

std::string unit_name(const ParamSlot& first, const ParamSlot& last) {
  return &first == &last ? first.name() : fmt::format("{}..{}", first.name(), last.name());
}

// Which parameters form a unit, before they are laid out.
struct UnitMembers {
  std::vector<size_t> params;
  int64_t nbytes = 0;
};

bool has_name_in(const ParamSlot& param, const std::set<std::string>& names) {
  return std::any_of(param.names.begin(), param.names.end(),
                     [&](const std::string& name) { return names.contains(name); });
}

bool stays_whole(const ParamSlot& param, const ShardPlan& plan,
                 const std::set<std::string>& whole) {
  if (plan.whole_numel > 0 && param.numel <= plan.whole_numel) return true;
  return has_name_in(param, whole);
}

// The user's units by name; -1 for parameters that are in none.
std::vector<int> user_units(const std::vector<ParamSlot>& params, const ShardPlan& plan) {
  std::map<std::string, int> unit_of_name;
  for (size_t i = 0; i < plan.units.size(); ++i) {
    for (const std::string& name : plan.units[i]) {
      TORCH_CHECK_VALUE(unit_of_name.emplace(name, static_cast<int>(i)).second,
                        "[fully_shard] plan.units: '", name, "' is in more than one unit");
    }
  }
  const auto names = std::views::keys(unit_of_name);
  check_known(params, "units", {names.begin(), names.end()});
  std::vector<int> result(params.size(), -1);
  for (size_t i = 0; i < params.size(); ++i) {
    for (const std::string& name : params[i].names) {
      if (unit_of_name.contains(name)) result[i] = unit_of_name[name];
    }
  }
  return result;
}

std::string module_of(const ParamSlot& param) {
  const std::string& name = param.names.front();
  return name.substr(0, name.rfind('.') + 1);
}

// The part of a unit that a tiny parameter, such as a bias, has at most.
constexpr int64_t kNearlyNothing = 64;

// Returns the bytes up to which `param` may fill a unit that begins with `first`. A tiny parameter
// stays with the large one before it in the same module: a unit of its own would cost more.
int64_t room_for(const ParamSlot& param, const ParamSlot& first, int64_t unit_bytes) {
  if (module_of(param) != module_of(first)) return unit_bytes;
  return std::max(unit_bytes, nbytes_of(first) + unit_bytes / kNearlyNothing);
}

// Packs parameters by size, in registration order. The parameters of
// a unit have the same dtypes, device, level and user's unit, and are all trainable or all frozen.
// Only tiny ones of those that may be cut are packed with whole ones: see [Note: Flat layout].
std::vector<UnitMembers> pack(const std::vector<ParamSlot>& params, const ShardPlan& plan,
                              const std::vector<ShardLevel>& levels) {
  const std::vector<int> user_unit = user_units(params, plan);
  std::vector<UnitMembers> units;
  const bool any_whole =
      std::ranges::any_of(params, [](auto& param) { return param.cut == Cut::kWhole; });
  const int64_t tiny_nbytes = plan.unit_bytes.value() / kNearlyNothing;
  std::map<std::tuple<at::ScalarType, at::ScalarType, int, int, bool, int, ShardLevel, int, bool>,
           size_t>
      open;
  for (size_t i = 0; i < params.size(); ++i) {
    const ParamSlot& param = params[i];
    const auto key =
        std::make_tuple(param.dtype, param.master_dtype, static_cast<int>(param.device.type()),
                        static_cast<int>(param.device.index()), param.requires_grad, param.group,
                        levels[i], user_unit[i],
                        any_whole && user_unit[i] < 0 && param.cut != Cut::kWhole &&
                            nbytes_of(param) > tiny_nbytes);
    const auto it = open.find(key);
    const auto is_room_in = [&](const UnitMembers& unit) {
      const ParamSlot& first = params[unit.params.front()];
      return unit.nbytes + nbytes_of(param) <= room_for(param, first, plan.unit_bytes.value());
    };
    const bool fits = it != open.end() && (user_unit[i] >= 0 || is_room_in(units[it->second]));
    if (!fits) {
      open[key] = units.size();
      units.emplace_back();
    }
    UnitMembers& unit = units[open[key]];
    unit.params.push_back(i);
    unit.nbytes += nbytes_of(param);
  }
  return units;
}

// Chooses the form of a unit's messages.
void choose_message_dtypes(UnitLayout& unit, bool is_trained, const ShardPlan& plan) {
  const auto reduce_dtype = plan.precision.reduce_dtype, gather_dtype = plan.precision.gather_dtype;
  const auto check_blocks = [&](const char* field, at::ScalarType wanted, at::ScalarType dtype) {
    TORCH_CHECK_NOT_IMPLEMENTED(dtype == at::kFloat || dtype == at::kBFloat16,
                                "[fully_shard] plan.", field, " ", wanted,
                                " is for elements of float and bfloat16; got ", dtype);
    TORCH_CHECK_NOT_IMPLEMENTED(computes_on_host(unit.device), "[fully_shard] plan.", field, " ",
                                wanted, " is for parameters in host memory; got device ",
                                unit.device);
  };
  if (is_trained && plan.outer && plan.outer->reduce_dtype)
    check_blocks("outer.reduce_dtype", *plan.outer->reduce_dtype,
                 c10::promoteTypes(unit.master_dtype, at::kFloat));
  if (reduce_dtype && block_encoding(*reduce_dtype)) {
    check_blocks("precision.reduce_dtype", *reduce_dtype, unit.dtype);
    check_blocks("precision.reduce_dtype", *reduce_dtype, unit.master_dtype);
    unit.reduce_encoding = *block_encoding(*reduce_dtype);
    unit.error_feedback = plan.precision.error_feedback;
  } else {
    if (reduce_dtype) unit.reduce_dtype = *reduce_dtype;
    if (reduce_dtype || is_trained)
      check_reducible("fully_shard", unit.reduce_dtype, ReduceOp::kSum, unit.master_dtype);
  }
  if (!gather_dtype || !is_trained ||
      c10::elementSize(*gather_dtype) >= c10::elementSize(unit.dtype))
    return;
  if (!block_encoding(*gather_dtype)) {
    unit.gather_dtype = *gather_dtype;
  } else if (unit.level != ShardLevel::kNone) {
    check_blocks("precision.gather_dtype", *gather_dtype, unit.dtype);
    unit.gather_encoding = *block_encoding(*gather_dtype);
  }
}

// A unit of parameters like this one.
UnitLayout start_unit(const ParamSlot& param, ShardLevel level, const ShardPlan& plan) {
  UnitLayout unit{.level = level,
                  .dtype = param.dtype,
                  .master_dtype = param.master_dtype,
                  .thawed_dtype = param.thawed_dtype,
                  .reduce_dtype = param.dtype,
                  .gather_dtype = param.dtype,
                  .device = param.device,
                  .group = param.group};
  if (!c10::isFloatingType(unit.dtype)) return unit;
  try {
    choose_message_dtypes(unit, param.requires_grad, plan);
  } catch (const c10::NotImplementedError& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, error.what_without_backtrace(), "; parameter '",
                                param.name(), "'");
  }
  return unit;
}

}  // namespace

at::Tensor ParamSlot::tensor(size_t i) const {
  auto impl = handles[i].lock();
  return impl ? at::Tensor(std::move(impl)) : at::Tensor();
}

at::Tensor ParamSlot::local(size_t i) const {
  const at::Tensor own = tensor(i);
  return own.defined() ? local_of(own) : own;
}

bool is_trained(const ParamSlot& slot) {
  const at::Tensor tensor = slot.tensor();
  return tensor.defined() && tensor.requires_grad();
}
bool is_trained(const UnitLayout& layout) {
  return std::ranges::any_of(layout.slots, [](const ParamSlot& slot) { return is_trained(slot); });
}

at::Tensor global_value(const ParamSlot& slot, const at::Tensor& local) {
  if (!slot.dist) return local;
  const DistSlot& dist = *slot.dist;
  return convert(local, *dist.spec, replicated(dist.spec->mesh), dist.sizes, slot.name());
}

at::Tensor local_value(const ParamSlot& slot, const at::Tensor& global) {
  if (!slot.dist) return global;
  return placed(global, *slot.dist->spec, slot.name());
}

std::pair<int64_t, int64_t> overlap(const ParamSlot& slot, int64_t begin, int64_t end) {
  const auto clamp = [&](int64_t position) {
    return std::clamp(position, slot.offset, slot.offset + slot.numel);
  };
  return {clamp(begin), clamp(end)};
}

at::Tensor view_param(const ParamSlot& slot, const at::Tensor& flat) {
  return at::as_strided(flat, slot.sizes, slot.strides, flat.storage_offset() + slot.offset);
}

at::Tensor flat_in_order(const at::Tensor& tensor, at::IntArrayRef strides) {
  at::Tensor ordered = tensor;
  if (tensor.strides() != strides) {
    ordered = at::empty_strided(tensor.sizes(), strides, tensor.options());
    ordered.copy_(tensor);
  }
  return at::as_strided(ordered, {tensor.numel()}, {1}, ordered.storage_offset());
}

std::vector<UnitLayout> lay_out(std::vector<ParamSlot> params, const ShardPlan& plan,
                                int world_size) {
  const std::set<std::string> whole(plan.whole.begin(), plan.whole.end());
  check_known(params, "whole", whole);
  std::vector<ShardLevel> levels;
  for (ParamSlot& param : params) {
    choose_dtypes(param, plan.precision);
    const bool keep = plan.level == ShardLevel::kParameters && stays_whole(param, plan, whole);
    levels.push_back(param.group == kOwnGroup ? ShardLevel::kNone
                     : keep                   ? ShardLevel::kGradients
                                              : plan.level);
  }
  choose_cuts(params, plan);
  const std::vector<UnitMembers> members = pack(params, plan, levels);
  std::map<int, std::vector<int64_t>> loads = {{0, std::vector<int64_t>(world_size)},
                                               {kOwnGroup, {0}}};
  for (size_t i = 0; i < plan.groups.size(); ++i)
    loads[static_cast<int>(i) + 1].resize(plan.groups[i].process_group->size());
  std::map<int, int> sizes;
  for (const auto& [group, ranks] : loads) sizes[group] = static_cast<int>(ranks.size());
  const std::vector<int> owners = choose_owners(params, plan, sizes);

  std::vector<UnitLayout> units;
  for (const UnitMembers& member : members) {
    const size_t first = member.params.front();
    UnitLayout unit = start_unit(params[first], levels[first], plan);
    unit.name = unit_name(params[first], params[member.params.back()]);
    std::vector<int> owners_here;
    for (const size_t i : member.params) {
      unit.slots.push_back(std::move(params[i]));
      owners_here.push_back(owners[i]);
    }
    place(unit, owners_here, loads[unit.group]);
    cut_chunks(unit);
    units.push_back(std::move(unit));
  }
  return units;
}

}  // namespace tessera
