#include "sim/planned_units.h"

namespace tessera {

// With one rank, its shard is the whole unit.
bool frees(const UnitLayout& unit, int ranks) {
  return unit.level == ShardLevel::kParameters && ranks > 1;
}

std::pair<int64_t, int64_t> updated_range(const UnitLayout& unit, int rank) {
  if (unit.level == ShardLevel::kNone) return {0, unit.numel()};
  return {unit.bounds[rank], unit.bounds[rank + 1]};
}

bool is_trainable(const UnitLayout& unit) { return unit.slots.front().requires_grad; }

ShardMemory planned_memory(const std::vector<UnitLayout>& units, const ShardPlan& plan,
                           const PlanReportOptions& options, int rank) {
  ShardMemory memory;
  const bool is_offloaded = plan.offload != Offload::kNone;
  int64_t state = 0, masters = 0;
  for (const UnitLayout& unit : units) {
    const auto [begin, end] = updated_range(unit, rank);
    const int64_t item = item_size(unit.master_dtype);
    if (options.shares_memory && unit.level != ShardLevel::kNone) {
      memory.parameters += unit.shard_numel(rank) * item_size(unit.dtype);
    } else if (!frees(unit, options.ranks)) {
      memory.parameters += unit.nbytes();
    } else if (!is_offloaded && !(plan.precision.master_only && unit.has_master())) {
      // Else the master copy serves as the shard.
      memory.parameters += unit.shard_numel(rank) * item_size(unit.dtype);
    }
    if (is_offloaded || unit.has_master()) masters += (end - begin) * item;
    if (!is_trainable(unit)) continue;
    memory.gradients += (end - begin) * item;
    for (const ParamSlot& slot : unit.slots) {
      const auto [slot_begin, slot_end] = overlap(slot, begin, end);
      state += (slot_end - slot_begin) * item * options.state_tensors;
    }
  }
  (is_offloaded ? memory.offloaded : memory.optimizer_state) += state;
  (is_offloaded ? memory.offloaded : memory.master_weights) += masters;
  return memory;
}

}  // namespace tessera
