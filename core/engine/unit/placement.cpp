#include "engine/unit/placement.h"

#include <ATen/TensorGeometry.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <ranges>
#include <string_view>
#include <utility>

#include "engine/unit/least_loaded.h"

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

int64_t align_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

int64_t alignment_of(at::ScalarType dtype) {
  return std::max<int64_t>(1, kAlignBytes / static_cast<int64_t>(c10::elementSize(dtype)));
}

bool fits(const GroupRule& rule, const ParamSlot& param) {
  return std::ranges::any_of(param.names, [&](auto& it) { return fits_pattern(rule.names, it); });
}
bool fits(const CutRule& rule, const ParamSlot& param) {
  if (static_cast<int64_t>(param.sizes.size()) < rule.min_dim) return false;
  return std::ranges::any_of(param.names, [&](auto& it) { return fits_pattern(rule.names, it); });
}
std::string dims_text(const GroupRule& /*rule*/) { return ""; }
std::string dims_text(const CutRule& rule) {
  return fmt::format(" of at least {} dims", rule.min_dim);
}

// Calls `apply` with each parameter that a rule fits, and the number of the first such rule. Throws
// for a rule that fits none.
template <class Rule, class Apply>
void apply_first(const char* member, const std::vector<Rule>& rules, std::vector<ParamSlot>& params,
                 Apply&& apply) {
  std::vector<bool> used(rules.size(), false);
  for (ParamSlot& param : params) {
    std::optional<size_t> first;
    for (size_t i = 0; i < rules.size(); ++i) {
      if (!fits(rules[i], param)) continue;
      used[i] = true;
      if (!first) first = i;
    }
    if (first) apply(param, *first);
  }
  for (size_t i = 0; i < rules.size(); ++i)
    TORCH_CHECK_VALUE(used[i], "[fully_shard] plan.", member, ": '", rules[i].names,
                      "' fits no parameter", dims_text(rules[i]), "; the first one is '",
                      params.front().name(), "'");
}

int64_t row_numel(const ParamSlot& param) {
  return param.sizes.empty() || param.sizes[0] == 0 ? param.numel : param.numel / param.sizes[0];
}

// Sets where a parameter may be cut.
void apply(const CutRule& rule, ParamSlot& param) {
  param.cut = rule.cut;
  if (rule.cut == Cut::kAnywhere || rule.cut == Cut::kWhole) return;
  const bool by_rows = rule.cut == Cut::kRows;
  TORCH_CHECK_VALUE(!by_rows || at::geometry_is_contiguous(param.sizes, param.strides),
                    "[fully_shard] plan.cuts: rows of '", param.name(), "' with strides ",
                    at::IntArrayRef(param.strides), " don't lie one after another in memory");
  const int64_t rows = param.sizes.empty() ? 1 : param.sizes[0],
                most = by_rows ? rows : param.numel;
  const bool is_named = rule.names.find('*') == std::string::npos;
  TORCH_CHECK_VALUE(!is_named || rule.size <= most, "[fully_shard] plan.cuts: a block of '",
                    param.name(), "' must have at most its ", most, by_rows ? " rows" : " elements",
                    "; got ", rule.size);
  param.block = std::min(rule.size, most) * (by_rows ? row_numel(param) : 1);
}

// The work of an update, in any unit.
int64_t update_work(const ParamSlot& param, const ShardPlan& plan) {
  const size_t dims = param.sizes.size();
  if (plan.cuts.empty() || dims < 2) return param.numel;
  return param.numel * std::min(param.sizes[dims - 2], param.sizes[dims - 1]);
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
    unit_.bounds.push_back(0);
    for (size_t rank = 0; rank < loads_.size(); ++rank) {
      const bool is_last = rank + 1 == loads_.size();
      int64_t room = shares_[rank];
      // A rank with whole parameters ends the parameter that another one has begun.
      if (placed_ > 0) place_part(is_last || !owned_[rank].empty(), room);
      if (placed_ == 0) {
        for (ParamSlot* slot : owned_[rank]) {
          begin(*slot);
          end_ = align_up(end_ + slot->numel, alignment_);
        }
        while (next_ < cut_.size() && placed_ == 0 && (is_last || begins(*cut_[next_], room)))
          place_part(is_last, room);
      }
      if (!is_last) shares_[rank + 1] += room;  // what was too little or too much
      loads_[rank] += end_ - unit_.bounds.back();
      unit_.bounds.push_back(end_);
    }
    std::vector<ParamSlot> ordered;
    for (ParamSlot* slot : order_) ordered.push_back(std::move(*slot));
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

  void begin(ParamSlot& slot) {
    slot.offset = end_;
    order_.push_back(&slot);
  }

  // Places the next part of the parameter that is to be cut.
  void place_part(bool to_its_end, int64_t& room) {
    ParamSlot& slot = *cut_[next_];
    const int64_t numel = to_its_end ? slot.numel - placed_ : fitting(slot, placed_, room);
    if (placed_ == 0) begin(slot);
    end_ = align_up(end_ + numel, alignment_);
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

}  // namespace

void check_known(const std::vector<ParamSlot>& params, const char* member,
                 std::set<std::string> names) {
  for (const ParamSlot& param : params) {
    for (const std::string& name : param.names) names.erase(name);
  }
  TORCH_CHECK_VALUE(names.empty(), "[fully_shard] plan.", member, " names '",
                    names.empty() ? "" : *names.begin(), "', which the model does not have");
}

void choose_groups(std::vector<ParamSlot>& params, const ShardPlan& plan) {
  const std::set<std::string> own(plan.unreplicated.begin(), plan.unreplicated.end());
  check_known(params, "unreplicated", own);
  for (ParamSlot& param : params) {
    if (std::ranges::any_of(param.names, [&](auto& name) { return own.contains(name); }))
      param.group = kOwnGroup;
  }
  apply_first("groups", plan.groups, params, [&](ParamSlot& param, size_t rule) {
    TORCH_CHECK_VALUE(param.group == 0, "[fully_shard] '", param.name(),
                      "' is each rank's own (plan.unreplicated), and fits a rule of plan.groups");
    param.group = static_cast<int>(rule) + 1;
  });
}

void choose_cuts(std::vector<ParamSlot>& params, const ShardPlan& plan) {
  for (ParamSlot& param : params)
    param.cut = plan.partition == Partition::kWholeParam ? Cut::kWhole : Cut::kAnywhere;
  apply_first("cuts", plan.cuts, params,
              [&](ParamSlot& param, size_t rule) { apply(plan.cuts[rule], param); });
}

std::vector<int> choose_owners(const std::vector<ParamSlot>& params, const ShardPlan& plan,
                               const std::map<int, int>& sizes) {
  const auto names = std::views::keys(plan.owners);
  check_known(params, "owners", {names.begin(), names.end()});
  std::map<int, LeastLoaded> loads;
  std::vector<int> owners;
  for (const ParamSlot& param : params) {
    const int world_size = sizes.at(param.group);
    LeastLoaded& ranks = loads.try_emplace(param.group, world_size).first->second;
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
    owners.push_back(owner);
    if (param.cut == Cut::kWhole && param.requires_grad) ranks.add(owner, update_work(param, plan));
  }
  return owners;
}

void place(UnitLayout& unit, const std::vector<int>& owners, std::vector<int64_t>& loads) {
  if (std::ranges::all_of(unit.slots, [](auto& slot) { return slot.cut == Cut::kAnywhere; })) {
    place_evenly(unit, static_cast<int>(loads.size()));
  } else {
    Packing(unit, owners, loads).place();
  }
}

int owner_of(const UnitLayout& unit, const ParamSlot& slot) {
  if (slot.cut != Cut::kWhole || slot.numel == 0) return -1;
  return static_cast<int>(std::ranges::upper_bound(unit.bounds, slot.offset) -
                          unit.bounds.begin()) -
         1;
}

std::string cut_text(Cut cut, int64_t block, int owner) {
  if (cut == Cut::kAnywhere) return "anywhere";
  if (cut == Cut::kWhole) return owner < 0 ? "whole" : fmt::format("whole, on rank {}", owner);
  return fmt::format("between blocks of {} elements{}", block,
                     cut == Cut::kRows ? ", which are rows" : "");
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

at::Tensor flat_part(const ParamSlot& slot, const at::Tensor& part) {
  return part.sizes() == at::IntArrayRef(slot.sizes) ? flat_in_order(part, slot.strides)
                                                     : part.reshape({-1});
}

}  // namespace tessera
