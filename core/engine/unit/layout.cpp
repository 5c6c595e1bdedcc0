#include "engine/unit/layout.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <ranges>
#include <set>
#include <string_view>
#include <tuple>

#include "base/device/device.h"
#include "comm/group/encoding.h"
#include "comm/group/local_sum.h"
#include "engine/unit/least_loaded.h"
#include "engine/unit/name_pattern.h"
#include "tensor/placed.h"
#include "tensor/redistribute.h"

namespace tessera {

// [Note: Flat layout]
//
// A unit's parameters lie one after another in a flat buffer, each in its own memory order (strides
// are kept, so channels_last stays so) and each starting at a multiple of 64 bytes, because matrix
// kernels run faster on aligned weights.
//
// Where all parameters may be cut anywhere, the buffer is padded to N equal shards whose borders
// are multiples of 64 bytes, too. A border usually falls inside a parameter; both ranks then own a
// segment of it.
//
// Otherwise each rank has, in this order, the rest of a parameter that the rank before has begun,
// the whole parameters that it owns, and the next ones of those that may be cut, up to a border
// that is one of their blocks'. The latter fill the ranks up to equal numbers of elements, over all
// units so far. A rank with whole parameters takes all of the rest, as these can't lie within
// another parameter: so no large ones that may be cut are packed with whole ones. Shards differ in
// size and may be empty. All other code sees only `bounds`.
namespace {

constexpr int64_t kAlignBytes = 64;
// Gradients below this are copied together: a message costs more than the copy.
constexpr int64_t kSmallGradBytes = int64_t{128} << 10;

int64_t align_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

int64_t alignment_of(at::ScalarType dtype) {
  return std::max<int64_t>(1, kAlignBytes / static_cast<int64_t>(c10::elementSize(dtype)));
}

int64_t nbytes_of(const ParamSlot& slot) {
  return slot.numel * static_cast<int64_t>(c10::elementSize(slot.dtype));
}

// Chooses the dtypes in which a parameter is used and is updated by the optimizer. A frozen
// parameter keeps the dtype that it was made with, so that no value is lost; it gets a wider master
// copy when it is trained.
void choose_dtypes(ParamSlot& param, const Precision& precision) {
  param.master_dtype = param.thawed_dtype = param.dtype;
  if (!c10::isFloatingType(param.dtype)) return;
  const auto wider = [](at::ScalarType a, at::ScalarType b) {
    return c10::elementSize(b) > c10::elementSize(a) ? b : a;
  };
  const at::ScalarType used = precision.param_dtype.value_or(param.dtype);
  const at::ScalarType own = wider(param.dtype, used);
  param.thawed_dtype = wider(own, precision.master_dtype.value_or(own));
  param.master_dtype = param.requires_grad ? param.thawed_dtype : own;
  param.dtype = used;
}

// Throws unless all `names`, of one member of the plan, are the model's.
void check_known(const std::vector<ParamSlot>& params, const char* member,
                 std::set<std::string> names) {
  for (const ParamSlot& param : params) {
    for (const std::string& name : param.names) names.erase(name);
  }
  TORCH_CHECK_VALUE(names.empty(), "[fully_shard] plan.", member, " names '",
                    names.empty() ? "" : *names.begin(), "', which the model does not have");
}

bool fits(const CutRule& rule, const ParamSlot& param) {
  if (static_cast<int64_t>(param.sizes.size()) < rule.min_dim) return false;
  return std::ranges::any_of(
      param.names, [&](const std::string& name) { return fits_pattern(rule.names, name); });
}

int64_t row_numel(const ParamSlot& param) {
  return param.sizes.empty() || param.sizes[0] == 0 ? param.numel : param.numel / param.sizes[0];
}

void check_rows(const ParamSlot& param) {
  TORCH_CHECK_VALUE(
      at::IntArrayRef(param.strides) == at::IntArrayRef(c10::contiguous_strides(param.sizes)),
      "[fully_shard] plan.cuts: rows of '", param.name(), "' with strides ",
      at::IntArrayRef(param.strides), " don't lie one after another in memory");
}

// Sets where a parameter may be cut.
void apply(const CutRule& rule, ParamSlot& param) {
  param.cut = rule.cut;
  if (rule.cut == Cut::kAnywhere || rule.cut == Cut::kWhole) return;
  if (rule.cut == Cut::kRows) check_rows(param);
  const int64_t rows = param.sizes.empty() ? 1 : param.sizes[0];
  const int64_t most = rule.cut == Cut::kRows ? rows : param.numel;
  const bool is_named = rule.names.find('*') == std::string::npos;
  TORCH_CHECK_VALUE(!is_named || rule.size <= most, "[fully_shard] plan.cuts: a block of '",
                    param.name(), "' must have at most its ", most,
                    rule.cut == Cut::kRows ? " rows" : " elements", "; got ", rule.size);
  param.block = std::min(rule.size, most) * (rule.cut == Cut::kRows ? row_numel(param) : 1);
}

void choose_cuts(std::vector<ParamSlot>& params, const ShardPlan& plan) {
  std::vector<bool> used(plan.cuts.size(), false);
  for (ParamSlot& param : params) {
    param.cut = plan.partition == Partition::kWholeParam ? Cut::kWhole : Cut::kAnywhere;
    const auto rule = std::ranges::find_if(
        plan.cuts, [&](const CutRule& candidate) { return fits(candidate, param); });
    if (rule != plan.cuts.end()) apply(*rule, param);
    for (size_t i = 0; i < plan.cuts.size(); ++i)
      if (fits(plan.cuts[i], param)) used[i] = true;
  }
  for (size_t i = 0; i < plan.cuts.size(); ++i)
    TORCH_CHECK_VALUE(used[i], "[fully_shard] plan.cuts: '", plan.cuts[i].names,
                      "' fits no parameter of at least ", plan.cuts[i].min_dim,
                      " dims; the first one is '", params.front().name(), "'");
}

// The work of an update, in any unit.
int64_t update_work(const ParamSlot& param, const ShardPlan& plan) {
  const size_t dims = param.sizes.size();
  if (plan.cuts.empty() || dims < 2) return param.numel;
  return param.numel * std::min(param.sizes[dims - 2], param.sizes[dims - 1]);
}

// Each whole parameter's owner: the plan's, or else the rank with the least work so far, the lowest
// of equals.
std::vector<int> choose_owners(const std::vector<ParamSlot>& params, const ShardPlan& plan,
                               int world_size) {
  const auto names = std::views::keys(plan.owners);
  check_known(params, "owners", {names.begin(), names.end()});
  LeastLoaded ranks(world_size);
  std::vector<int> owners;
  for (const ParamSlot& param : params) {
    int owner = ranks.next();
    for (const std::string& name : param.names) {
      const auto it = plan.owners.find(name);
      if (it == plan.owners.end()) continue;
      owner = it->second;
      TORCH_CHECK_VALUE(owner >= 0 && owner < world_size,
                        "[fully_shard] plan.owners must name ranks from 0 to ", world_size - 1,
                        "; got ", owner, " for '", name, "'");
      TORCH_CHECK_VALUE(param.cut == Cut::kWhole, "[fully_shard] plan.owners has '", name,
                        "', which may be cut over all ranks: whole parameters alone have owners "
                        "(Partition::kWholeParam, or Cut::kWhole)");
    }
    owners.push_back(param.is_replicated ? owner : 0);  // one rank has it: the first of one
    if (param.cut == Cut::kWhole && param.requires_grad && param.is_replicated)
      ranks.add(owner, update_work(param, plan));
  }
  return owners;
}

void place_evenly(UnitLayout& unit, int world_size) {
  const int64_t alignment = alignment_of(unit.dtype);
  int64_t end = 0;
  for (ParamSlot& slot : unit.slots) {
    slot.offset = align_up(end, alignment);
    end = slot.offset + slot.numel;
  }
  const int64_t shard = align_up((end + world_size - 1) / world_size, alignment);
  for (int rank = 0; rank <= world_size; ++rank) unit.bounds.push_back(shard * rank);
}

// Returns how many of `amount` elements each rank gets so that all have as many as possible in
// common, where ranks have `loads` before.
std::vector<int64_t> fill_up(std::vector<int64_t> loads, int64_t amount) {
  std::vector<int64_t> sorted = loads;
  std::ranges::sort(sorted);
  int64_t level = 0, below = 0;  // the sum of the loads below the level
  for (size_t ranks = 1; ranks <= sorted.size(); ++ranks) {
    below += sorted[ranks - 1];
    level = (amount + below + static_cast<int64_t>(ranks) - 1) / static_cast<int64_t>(ranks);
    if (ranks == sorted.size() || level <= sorted[ranks]) break;
  }
  for (int64_t& load : loads) load = std::max<int64_t>(0, level - load);
  return loads;
}

// Lays out a unit whose parameters may not all be cut anywhere; see [Note: Flat layout]. Slots come
// in registration order. Adds to the `loads` of ranks.
class Packing {
 public:
  Packing(UnitLayout& unit, const std::vector<int>& owners, std::vector<int64_t>& loads)
      : unit_(unit), loads_(loads), alignment_(alignment_of(unit.dtype)), owned_(loads.size()) {
    int64_t numel = 0;
    std::vector<int64_t> before = loads;
    for (size_t i = 0; i < unit.slots.size(); ++i) {
      ParamSlot& slot = unit.slots[i];
      if (slot.cut == Cut::kWhole) {
        owned_[owners[i]].push_back(&slot);
        before[owners[i]] += align_up(slot.numel, alignment_);
      } else {
        cut_.push_back(&slot);
        numel += align_up(slot.numel, alignment_);
      }
    }
    shares_ = fill_up(std::move(before), numel);
  }

  void place() {
    std::vector<ParamSlot> ordered;
    unit_.bounds.push_back(0);
    for (size_t rank = 0; rank < loads_.size(); ++rank) {
      const bool is_last = rank + 1 == loads_.size();
      int64_t room = shares_[rank];
      // A rank with whole parameters ends the parameter that another one has begun.
      if (placed_ > 0) place_part(is_last || !owned_[rank].empty(), room);
      if (placed_ == 0) {
        for (ParamSlot* slot : owned_[rank]) begin(*slot, slot->numel);
        while (next_ < cut_.size() && placed_ == 0 && (is_last || begins(*cut_[next_], room)))
          place_part(is_last, room);
      }
      if (!is_last) shares_[rank + 1] += room;  // what was too little or too much
      loads_[rank] += end_ - unit_.bounds.back();
      unit_.bounds.push_back(end_);
    }
    for (const ParamSlot* slot : order_) ordered.push_back(*slot);
    unit_.slots = std::move(ordered);
  }

 private:
  // How many elements of a parameter, after the first `placed`, best fill `room`.
  int64_t fitting(const ParamSlot& slot, int64_t placed, int64_t room) const {
    const int64_t rest = slot.numel - placed;
    const int64_t block = std::lcm(std::max<int64_t>(1, slot.block), alignment_);
    if (room >= rest) return rest;
    return std::clamp<int64_t>((room + block / 2) / block * block, 0, rest);
  }

  bool begins(const ParamSlot& slot, int64_t room) const {
    return slot.numel == 0 || fitting(slot, 0, room) > 0;
  }

  void begin(ParamSlot& slot, int64_t numel) {
    slot.offset = end_;
    order_.push_back(&slot);
    end_ = align_up(end_ + numel, alignment_);
  }

  // Places the next part of the parameter that is to be cut.
  void place_part(bool to_its_end, int64_t& room) {
    ParamSlot& slot = *cut_[next_];
    const int64_t numel = to_its_end ? slot.numel - placed_ : fitting(slot, placed_, room);
    if (placed_ == 0) {
      begin(slot, numel);
    } else {
      end_ = align_up(end_ + numel, alignment_);
    }
    room -= numel;
    placed_ += numel;
    if (placed_ < slot.numel) return;
    placed_ = 0;
    ++next_;
  }

  UnitLayout& unit_;
  std::vector<int64_t>& loads_;  // elements by rank
  const int64_t alignment_;
  std::vector<std::vector<ParamSlot*>> owned_;  // by rank
  std::vector<ParamSlot*> cut_;
  std::vector<int64_t> shares_;  // elements of those, by rank
  std::vector<ParamSlot*> order_;
  size_t next_ = 0;     // of `cut_`
  int64_t placed_ = 0;  // elements of that
  int64_t end_ = 0;     // of what is placed
};

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
// Of those that may be cut, only tiny ones are packed with whole ones: see [Note: Flat layout].
std::vector<UnitMembers> pack(const std::vector<ParamSlot>& params, const ShardPlan& plan,
                              const std::vector<ShardLevel>& levels) {
  const std::vector<int> user_unit = user_units(params, plan);
  std::vector<UnitMembers> units;
  const bool any_whole =
      std::ranges::any_of(params, [](auto& param) { return param.cut == Cut::kWhole; });
  const int64_t tiny_nbytes = plan.unit_bytes.value() / kNearlyNothing;
  std::map<std::tuple<at::ScalarType, at::ScalarType, int, int, bool, bool, ShardLevel, int, bool>,
           size_t>
      open;
  for (size_t i = 0; i < params.size(); ++i) {
    const ParamSlot& param = params[i];
    const auto key =
        std::make_tuple(param.dtype, param.master_dtype, static_cast<int>(param.device.type()),
                        static_cast<int>(param.device.index()), param.requires_grad,
                        param.is_replicated, levels[i], user_unit[i],
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
                                "[fully_shard] plan.precision.", field, " ", wanted,
                                " is for elements of float and bfloat16; got ", dtype);
    TORCH_CHECK_NOT_IMPLEMENTED(computes_on_host(unit.device), "[fully_shard] plan.precision.",
                                field, " ", wanted,
                                " is for parameters in host memory; got device ", unit.device);
  };
  if (reduce_dtype && block_encoding(*reduce_dtype)) {
    check_blocks("reduce_dtype", *reduce_dtype, unit.dtype);
    check_blocks("reduce_dtype", *reduce_dtype, unit.master_dtype);
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
    check_blocks("gather_dtype", *gather_dtype, unit.dtype);
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
                  .is_replicated = param.is_replicated};
  if (c10::isFloatingType(unit.dtype)) choose_message_dtypes(unit, param.requires_grad, plan);
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

bool fits_pattern(std::string_view pattern, std::string_view name) {
  const size_t star = pattern.find('*');
  if (star == std::string_view::npos) return name == pattern;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  name.remove_prefix(star);
  pattern.remove_prefix(star + 1);
  for (size_t skipped = 0; skipped <= name.size(); ++skipped)
    if (fits_pattern(pattern, name.substr(skipped))) return true;
  return false;
}

std::vector<int64_t> part_sizes(const ParamSlot& slot, int64_t numel) {
  if (slot.cut == Cut::kWhole && numel == slot.numel) return slot.sizes;
  if (slot.cut != Cut::kRows || slot.sizes.empty() || numel == 0) return {numel};
  std::vector<int64_t> sizes = slot.sizes;
  sizes[0] = numel / row_numel(slot);
  return sizes;
}

at::Tensor shaped_part(const ParamSlot& slot, const at::Tensor& part) {
  if (slot.cut == Cut::kWhole && part.numel() == slot.numel)
    return at::as_strided(part, slot.sizes, slot.strides, part.storage_offset());
  return part.view(part_sizes(slot, part.numel()));
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
  const std::set<std::string> own(plan.unreplicated.begin(), plan.unreplicated.end());
  check_known(params, "whole", whole);
  check_known(params, "unreplicated", own);
  std::vector<ShardLevel> levels;
  for (ParamSlot& param : params) {
    choose_dtypes(param, plan.precision);
    param.is_replicated = !has_name_in(param, own);
    const bool keep = plan.level == ShardLevel::kParameters && stays_whole(param, plan, whole);
    levels.push_back(!param.is_replicated ? ShardLevel::kNone
                     : keep               ? ShardLevel::kGradients
                                          : plan.level);
  }
  choose_cuts(params, plan);
  const std::vector<UnitMembers> members = pack(params, plan, levels);
  const std::vector<int> owners = choose_owners(params, plan, world_size);

  std::vector<UnitLayout> units;
  std::vector<int64_t> loads(world_size, 0), alone{0};
  for (const UnitMembers& member : members) {
    const size_t first = member.params.front();
    UnitLayout unit = start_unit(params[first], levels[first], plan);
    unit.name = unit_name(params[first], params[member.params.back()]);
    std::vector<int> owners_here;
    for (const size_t i : member.params) {
      unit.slots.push_back(std::move(params[i]));
      owners_here.push_back(owners[i]);
    }
    if (std::ranges::all_of(unit.slots, [](auto& slot) { return slot.cut == Cut::kAnywhere; })) {
      place_evenly(unit, unit.is_replicated ? world_size : 1);
    } else {
      Packing(unit, owners_here, unit.is_replicated ? loads : alone).place();
    }
    cut_chunks(unit);
    units.push_back(std::move(unit));
  }
  return units;
}

}  // namespace tessera
