#include <c10/util/Exception.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/planner/plan_report.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <set>

#include "base/files/untrusted.h"
#include "comm/group/encoding.h"
#include "comm/group/sent_bytes.h"
#include "engine/access/use_order.h"
#include "engine/grad/grad_bucket.h"
#include "engine/grad/reducer.h"
#include "engine/model/sharded_state.h"
#include "engine/optim/param_state.h"
#include "engine/unit/layout.h"
#include "planner/planned_peak.h"
#include "planner/planned_units.h"

namespace tessera {
namespace {

void check_options(const PlanReportOptions& options) {
  TORCH_CHECK_VALUE(options.ranks >= 1, "[plan_report] options.ranks must be at least 1; got ",
                    options.ranks);
  TORCH_CHECK_VALUE(options.replicas >= 1,
                    "[plan_report] options.replicas must be at least 1; got ", options.replicas);
  TORCH_CHECK_VALUE(options.rank >= 0 && options.rank < options.ranks,
                    "[plan_report] options.rank must be from 0 to ", options.ranks - 1, "; got ",
                    options.rank);
  TORCH_CHECK_VALUE(options.state_tensors >= 0,
                    "[plan_report] options.state_tensors must not be negative; got ",
                    options.state_tensors);
}

// Returns the range that a rank updates, in elements of the unit's flat buffer.
std::pair<int64_t, int64_t> updated_range(const UnitLayout& unit, int rank) {
  if (unit.level == ShardLevel::kNone) return {0, unit.numel()};
  return {unit.bounds[rank], unit.bounds[rank + 1]};
}

// Returns the bytes of the reduced gradients that a rank keeps, by unit.
std::vector<int64_t> reduced_nbytes(const std::vector<UnitLayout>& units, int rank) {
  std::vector<int64_t> nbytes;
  for (const UnitLayout& unit : units) {
    const auto [begin, end] = updated_range(unit, rank);
    nbytes.push_back(is_trainable(unit) ? (end - begin) * item_size(unit.master_dtype) : 0);
  }
  return nbytes;
}

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
    const bool is_sent = unit.is_replicated && options.ranks > 1 && !options.shares_memory;
    if (unit.error_feedback && is_sent) {
      const bool gathers_sums = unit.level == ShardLevel::kNone;
      memory.gradients +=
          (unit.numel() + (gathers_sums ? unit.shard_numel(rank) : 0)) * item_size(at::kFloat);
    }
    for (const ParamSlot& slot : unit.slots) {
      const auto [slot_begin, slot_end] = overlap(slot, begin, end);
      state += (slot_end - slot_begin) * item * options.state_tensors;
    }
  }
  (is_offloaded ? memory.offloaded : memory.optimizer_state) += state;
  (is_offloaded ? memory.offloaded : memory.master_weights) += masters;
  return memory;
}

// How often each unit is gathered in a pass, and the peak of the gathered bytes.
struct PlannedGathers {
  std::vector<int> forward, backward;  // by unit
  std::vector<int> reductions;         // units in the order of reductions
  PassOrder pass;
  std::vector<int64_t> bytes;  // of gathered parameters, by position in the order
  int64_t peak_bytes = 0;
};

using Entry = CollectiveCounts::Entry;

// Leaves room for the sum of all entries.
constexpr int64_t kMostBytes = int64_t{1} << 59;

void add(Entry& entry, int64_t calls, int64_t bytes) {
  entry.calls += calls;
  entry.bytes_sent = checked_sum(entry.bytes_sent, checked_product(calls, bytes));
  TORCH_CHECK_VALUE(entry.bytes_sent <= kMostBytes, "[plan_report] a rank must send at most ",
                    kMostBytes, " bytes in a step; got ", entry.bytes_sent);
}

int64_t sent_by_gather(int64_t numel, at::ScalarType dtype, Encoding encoding,
                       const PlanReportOptions& options) {
  const int64_t nbytes = encoding == Encoding::kPlain ? checked_product(numel, item_size(dtype))
                                                      : encoded_nbytes(encoding, numel, dtype);
  return checked_product(options.ranks - 1, nbytes);
}

// The bytes of gradients that a rank sends to the others. Encoded messages are made of parts, each
// with blocks of its own.
int64_t reduced_bytes(const UnitLayout& unit, int rank) {
  if (unit.reduce_encoding == Encoding::kPlain)
    return (unit.numel() - unit.shard_numel(rank)) * item_size(unit.reduce_dtype);
  int64_t bytes = 0;
  const auto ranks = static_cast<int>(unit.bounds.size()) - 1;
  for (int other = 0; other < ranks; ++other) {
    if (other == rank) continue;
    for (const GradChunk& chunk : unit.chunks) {
      const int64_t numel =
          std::min(chunk.end, unit.bounds[other + 1]) - std::max(chunk.begin, unit.bounds[other]);
      if (numel > 0) bytes += encoded_nbytes(unit.reduce_encoding, numel, unit.reduce_dtype);
    }
  }
  return bytes;
}

// Adds the reduction of the gradients of one bucket's units.
void add_reductions(PlannedTraffic& traffic, const std::vector<const UnitLayout*>& units,
                    const PlanReportOptions& options, int rank) {
  int64_t sent = 0, kept = 0;
  for (const UnitLayout* unit : units) {
    const int64_t own = unit->shard_numel(rank);
    const int64_t own_bytes = own * item_size(unit->master_dtype);
    sent += reduced_bytes(*unit, rank);
    kept += own_bytes;
    if (unit->level != ShardLevel::kNone || options.ranks == 1) continue;
    const int64_t gathered =
        sent_by_gather(own, unit->master_dtype, unit->reduce_encoding, options);
    if (units.size() == 1 && unit->may_gather_sums() && options.replicas == 1) {
      sent += gathered;
    } else {
      add(traffic.gather_reduced, 1, gathered);
    }
  }
  add(traffic.reduce, 1, sent);
  if (options.replicas > 1) add(traffic.replicate, 1, all_reduce_bytes(kept, options.replicas));
}

PlannedGathers plan_gathers(const std::vector<UnitLayout>& units, const ShardPlan& plan,
                            const PlanReportOptions& options) {
  const PassOrder pass = order_of_use(units, options.forward_order, options.backward_order);
  const UseOrder order = pass.joined();
  PlannedGathers gathers{std::vector<int>(units.size()), std::vector<int>(units.size()),
                         expected_reduction_order(pass.forward, static_cast<int>(units.size())),
                         pass};
  const std::vector<int64_t> nbytes = freed_nbytes(units, options.ranks);
  for (size_t unit = 0; unit < units.size(); ++unit) {
    // A unit without bytes is in no residency plan: it is gathered when it is used.
    const bool is_used = std::find(order.begin(), order.end(), unit) != order.end();
    if (frees(units[unit], options.ranks) && nbytes[unit] == 0 && is_used)
      gathers.forward[unit] = 1;
  }
  const auto steps = plan_residency(order, nbytes, plan.resident_bytes, plan.prefetch);
  for (size_t position = 0; position < steps.size(); ++position) {
    auto& pass_gathers = position < pass.forward.size() ? gathers.forward : gathers.backward;
    for (const int unit : steps[position].gather) ++pass_gathers[unit];
  }
  gathers.bytes = gathered_bytes(steps, nbytes);
  for (const int64_t bytes : gathers.bytes)
    gathers.peak_bytes = std::max(gathers.peak_bytes, bytes);
  return gathers;
}

std::vector<GradBucket> buckets_of(const std::vector<UnitLayout>& units,
                                   const PlannedGathers& gathers, const ShardPlan& plan) {
  std::vector<const UnitLayout*> layouts;
  for (const UnitLayout& unit : units) layouts.push_back(&unit);
  return cut_buckets(layouts, gathers.reductions, plan.bucket_bytes);
}

PlannedTraffic planned_traffic(const std::vector<UnitLayout>& units, const PlannedGathers& gathers,
                               const ShardPlan& plan, const PlanReportOptions& options, int rank) {
  PlannedTraffic traffic;
  int64_t slots = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitLayout& unit = units[i];
    slots += static_cast<int64_t>(unit.slots.size());
    if (!unit.is_replicated) continue;  // other ranks take no part in it
    const int64_t gathered =
        sent_by_gather(unit.shard_numel(rank), unit.gather_dtype, unit.gather_encoding, options);
    add(traffic.gather_forward, gathers.forward[i], gathered);
    add(traffic.gather_backward, gathers.backward[i], gathered);
    if (!is_trainable(unit)) continue;
    const bool stays_whole = unit.level != ShardLevel::kNone && !frees(unit, options.ranks);
    if (stays_whole && options.ranks > 1) add(traffic.gather_updated, 1, gathered);
  }
  for (const GradBucket& bucket : buckets_of(units, gathers, plan)) {
    const UnitLayout& first = units[bucket.units.front()];
    if (!is_trainable(first) || !first.is_replicated) continue;
    std::vector<const UnitLayout*> together;
    for (const size_t unit : bucket.units) together.push_back(&units[unit]);
    add_reductions(traffic, together, options, rank);
  }
  const int64_t agreement = Reducer::agreement_nbytes(slots);
  if (options.ranks > 1) add(traffic.agree, 1, all_reduce_bytes(agreement, options.ranks));
  if (options.replicas > 1)
    add(traffic.agree_replicas, 1, all_reduce_bytes(agreement, options.replicas));
  return traffic;
}

double zero_paper_bytes(const std::vector<UnitLayout>& units, ShardLevel level,
                        const PlanReportOptions& options) {
  double parameters = 0, gradients = 0, state = 0;
  for (const UnitLayout& unit : units) {
    double numel = 0;
    for (const ParamSlot& slot : unit.slots) numel += static_cast<double>(slot.numel);
    const auto item = static_cast<double>(item_size(unit.dtype));
    const auto master_item = static_cast<double>(item_size(unit.master_dtype));
    parameters += numel * item;
    if (!is_trainable(unit)) continue;
    gradients += numel * item;
    state += numel * master_item * (options.state_tensors + (unit.has_master() ? 1 : 0));
  }
  if (level >= ShardLevel::kOptimizerState) state /= options.ranks;
  if (level >= ShardLevel::kGradients) gradients /= options.ranks;
  if (level >= ShardLevel::kParameters) parameters /= options.ranks;
  return parameters + gradients + state;
}

void list_units(PlanReport& report, const std::vector<UnitLayout>& units) {
  for (const UnitLayout& unit : units) {
    report.units.push_back(
        {unit.name, unit.numel(), unit.nbytes(), unit.level, is_trainable(unit)});
    for (const ParamSlot& slot : unit.slots) report.parameters += slot.numel;
    if (unit.nbytes() > report.units[report.largest_unit].nbytes)
      report.largest_unit = report.units.size() - 1;
  }
}

}  // namespace

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

int64_t PlannedRank::kept() const {
  return memory.parameters + memory.gradients + memory.optimizer_state + memory.master_weights +
         memory.offloaded;
}

PlanReport plan_report(const std::vector<ParameterSize>& parameters, const ShardPlan& wanted,
                       const PlanReportOptions& given) {
  check_options(given);
  const ShardPlan plan =
      foreseeable_plan(wanted, /*sends_nothing=*/given.ranks == 1 || given.shares_memory);
  const auto units = planned_units(parameters, plan, given.ranks);
  const PlanReportOptions options = with_order_of_moments(units, plan, given);
  const PlannedGathers gathers = plan_gathers(units, plan, options);
  const auto planned = [&](int rank) {
    PlannedRank result{rank, planned_memory(units, plan, options, rank)};
    if (options.shares_memory) return result;  // nothing is gathered or sent
    result.traffic = planned_traffic(units, gathers, plan, options, rank);
    result.memory.peak_unsharded = gathers.peak_bytes;
    return result;
  };
  PlanReport report;
  list_units(report, units);
  report.rank = planned(options.rank);
  report.fullest = report.busiest = planned(0);
  // Shards that are cut evenly are equal except for the padding, which only the last ones have.
  for (int rank = 1; rank < options.ranks; ++rank) {
    const PlannedRank other = planned(rank);
    if (other.kept() > report.fullest.kept()) report.fullest = other;
    if (other.traffic.bytes_sent() > report.busiest.traffic.bytes_sent()) report.busiest = other;
  }
  // Ranks that share memory gather nothing: each unit is in place.
  const PeakSearch peaks(units, options, gathers.pass,
                         options.shares_memory ? std::vector<int64_t>() : gathers.bytes,
                         buckets_of(units, gathers, plan));
  for (PlannedRank* found : {&report.rank, &report.fullest})
    peaks.find(*found, reduced_nbytes(units, found->rank));
  report.zero_paper_bytes = zero_paper_bytes(units, plan.level, options);
  return report;
}

std::vector<ParameterSize> parameter_sizes(const torch::nn::Module& module) {
  std::vector<ParameterSize> sizes;
  for (ParamSlot& slot : collect_parameters(named_tensors(module.named_parameters())))
    sizes.push_back({std::move(slot.names), std::move(slot.sizes), slot.dtype, slot.requires_grad});
  return sizes;
}

int state_tensors_of(torch::optim::Optimizer& optimizer) {
  std::set<size_t> counts;
  for (auto& param_group : optimizer.param_groups())
    counts.insert(state_names(optimizer, param_group).size());
  TORCH_CHECK_VALUE(counts.size() == 1,
                    "[state_tensors_of] the optimizer must keep the same number of tensors per "
                    "parameter in all param groups; got ",
                    counts.size(), " different numbers");
  return static_cast<int>(*counts.begin());
}

}  // namespace tessera
