#include <c10/util/Exception.h>
#include <tessera/process_group_decorators.h>

#include <algorithm>

#include "access/use_order.h"
#include "checkpoint/untrusted.h"
#include "grad/grad_bucket.h"
#include "group/sent_bytes.h"
#include "sim/planned_units.h"

namespace tessera {
namespace {

using Entry = CollectiveCounts::Entry;

PassOrder order_of_use(const std::vector<UnitLayout>& units, const PlanReportOptions& options) {
  const int count = static_cast<int>(units.size());
  if (options.forward_order.empty() && options.backward_order.empty())
    return registration_order(count);
  PassOrder pass;
  for (const bool forward : {true, false}) {
    for (const int unit : forward ? options.forward_order : options.backward_order) {
      TORCH_CHECK_VALUE(unit >= 0 && unit < count, "[plan_report] options.",
                        forward ? "forward_order" : "backward_order", " must name units from 0 to ",
                        count - 1, "; got ", unit);
      append_use(forward ? pass.forward : pass.backward, unit);
    }
  }
  std::vector<int> trainable;
  for (int unit = 0; unit < count; ++unit) {
    if (is_trainable(units[unit])) trainable.push_back(unit);
  }
  insert_missing(pass, trainable);
  return pass;
}

// Leaves room for the sum of all entries.
constexpr int64_t kMostBytes = int64_t{1} << 59;

void add(Entry& entry, int64_t calls, int64_t bytes) {
  entry.calls += calls;
  entry.bytes_sent = checked_sum(entry.bytes_sent, checked_product(calls, bytes));
  TORCH_CHECK_VALUE(entry.bytes_sent <= kMostBytes, "[plan_report] a rank must send at most ",
                    kMostBytes, " bytes in a step; got ", entry.bytes_sent);
}

int64_t gathered_bytes(int64_t numel, at::ScalarType dtype, const PlanReportOptions& options) {
  return checked_product(options.ranks - 1, checked_product(numel, item_size(dtype)));
}

// Adds the reduction of the gradients of one bucket's units.
void add_reductions(PlannedTraffic& traffic, const std::vector<const UnitLayout*>& units,
                    const PlanReportOptions& options, int rank) {
  int64_t sent = 0, kept = 0;
  for (const UnitLayout* unit : units) {
    const int64_t own = unit->shard_numel(rank);
    const int64_t own_bytes = own * item_size(unit->master_dtype);
    sent += (unit->numel() - own) * item_size(unit->reduce_dtype);
    kept += own_bytes;
    if (unit->level == ShardLevel::kNone && options.ranks > 1)
      add(traffic.gather_reduced, 1, gathered_bytes(own, unit->master_dtype, options));
  }
  add(traffic.reduce, 1, sent);
  if (options.replicas > 1) add(traffic.replicate, 1, all_reduce_bytes(kept, options.replicas));
}

}  // namespace

PlannedGathers plan_gathers(const std::vector<UnitLayout>& units, const ShardPlan& plan,
                            const PlanReportOptions& options) {
  const PassOrder pass = order_of_use(units, options);
  const UseOrder order = pass.joined();
  PlannedGathers gathers{std::vector<int>(units.size()), std::vector<int>(units.size()),
                         reduction_order(pass.backward, static_cast<int>(units.size()))};
  std::vector<int64_t> nbytes;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    const bool is_freed = frees(units[unit], options.ranks);
    nbytes.push_back(is_freed ? units[unit].nbytes() : 0);
    // A unit without bytes is in no residency plan: it is gathered when it is used.
    const bool is_used = std::find(order.begin(), order.end(), unit) != order.end();
    if (is_freed && nbytes.back() == 0 && is_used) gathers.forward[unit] = 1;
  }
  int64_t bytes = 0;
  const auto steps = plan_residency(order, nbytes, plan.resident_bytes, plan.prefetch);
  for (size_t position = 0; position < steps.size(); ++position) {
    for (const int unit : steps[position].free) bytes -= nbytes[unit];
    auto& pass_gathers = position < pass.forward.size() ? gathers.forward : gathers.backward;
    for (const int unit : steps[position].gather) {
      ++pass_gathers[unit];
      bytes += nbytes[unit];
    }
    gathers.peak_bytes = std::max(gathers.peak_bytes, bytes);
  }
  return gathers;
}

PlannedTraffic planned_traffic(const std::vector<UnitLayout>& units, const PlannedGathers& gathers,
                               const ShardPlan& plan, const PlanReportOptions& options, int rank) {
  PlannedTraffic traffic;
  int64_t slots = 0;
  std::vector<const UnitLayout*> layouts;
  for (const UnitLayout& unit : units) layouts.push_back(&unit);
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitLayout& unit = units[i];
    slots += static_cast<int64_t>(unit.slots.size());
    if (!unit.is_replicated) continue;  // other ranks take no part in it
    const int64_t gathered = gathered_bytes(unit.shard_numel(rank), unit.gather_dtype, options);
    add(traffic.gather_forward, gathers.forward[i], gathered);
    add(traffic.gather_backward, gathers.backward[i], gathered);
    if (!is_trainable(unit)) continue;
    const bool stays_whole = unit.level != ShardLevel::kNone && !frees(unit, options.ranks);
    if (stays_whole && options.ranks > 1) add(traffic.gather_updated, 1, gathered);
  }
  for (const GradBucket& bucket : cut_buckets(layouts, gathers.reductions, plan.bucket_bytes)) {
    const UnitLayout& first = units[bucket.units.front()];
    if (!is_trainable(first) || !first.is_replicated) continue;
    std::vector<const UnitLayout*> together;
    for (const size_t unit : bucket.units) together.push_back(&units[unit]);
    add_reductions(traffic, together, options, rank);
  }
  // A byte for each parameter, and one for whether any rank needs attention.
  if (options.ranks > 1) add(traffic.agree, 1, all_reduce_bytes(slots + 1, options.ranks));
  if (options.replicas > 1)
    add(traffic.agree_replicas, 1, all_reduce_bytes(slots + 1, options.replicas));
  return traffic;
}

CollectiveCounts PlannedTraffic::over_ranks() const {
  CollectiveCounts counts{.reduce_scatter = reduce, .all_reduce = agree};
  for (const Entry& entry : {gather_forward, gather_backward, gather_updated, gather_reduced}) {
    counts.all_gather.calls += entry.calls;
    counts.all_gather.bytes_sent += entry.bytes_sent;
  }
  return counts;
}

CollectiveCounts PlannedTraffic::over_replicas() const {
  return {.all_reduce = {replicate.calls + agree_replicas.calls,
                         replicate.bytes_sent + agree_replicas.bytes_sent}};
}

int64_t PlannedTraffic::bytes_sent() const {
  return over_ranks().bytes_sent() + over_replicas().bytes_sent();
}

}  // namespace tessera
