#include "planner/planned_peak.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/files/untrusted.h"
#include "planner/planned_units.h"

namespace tessera {
namespace {

// Leaves room for the sum of all kinds.
constexpr int64_t kMostActivations = int64_t{1} << 59;

// Parameters by name: the index of the unit, the bytes of the whole gradient, and the chunk that it
// shares with others; null: the gradient is kept as it is.
struct Placed {
  size_t unit;
  int64_t gradient_nbytes;
  const GradChunk* chunk = nullptr;
};
using Places = std::map<std::string, Placed>;

Places places_of(const std::vector<UnitLayout>& units) {
  Places places;
  const auto add = [&](size_t unit, size_t slot, const GradChunk* chunk) {
    const ParamSlot& param = units[unit].slots[slot];
    for (const std::string& name : param.names)
      places.emplace(name, Placed{unit, param.numel * item_size(units[unit].reduce_dtype), chunk});
  };
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (const GradChunk& chunk : units[unit].chunks)
      for (size_t slot = chunk.first_slot; slot < chunk.end_slot; ++slot)
        add(unit, slot, chunk.is_single() ? nullptr : &chunk);
    for (size_t slot = 0; slot < units[unit].slots.size(); ++slot) add(unit, slot, nullptr);
  }
  return places;
}

int64_t whole_gradients(const UnitLayout& unit) {
  return is_trainable(unit) ? unit.numel() * item_size(unit.reduce_dtype) : 0;
}

// The whole gradients that wait to be sent.
class WaitingGradients {
 public:
  explicit WaitingGradients(const std::vector<UnitLayout>& units)
      : units_(units), places_(places_of(units)), missing_(units.size()), nbytes_of_(units.size()) {
    for (size_t unit = 0; unit < units.size(); ++unit)
      missing_[unit] = is_trainable(units[unit]) ? units[unit].slots.size() : 0;
  }

  // Returns the bytes that exist besides `nbytes()` while the gradient arrives: a small one is
  // copied into its chunk, whose memory is made for the first of them.
  int64_t arrive(const std::string& name) {
    const auto it = places_.find(name);
    if (it == places_.end() || missing_[it->second.unit] == 0) return 0;
    const auto& [unit, gradient_nbytes, chunk] = it->second;
    --missing_[unit];
    if (!chunk) {
      add(unit, gradient_nbytes);
      return 0;
    }
    if (made_.insert(chunk).second)
      add(unit, (chunk->end - chunk->begin) * item_size(units_[unit].reduce_dtype));
    return gradient_nbytes;
  }

  bool has_all(const GradBucket& bucket) const {
    return std::ranges::all_of(bucket.units, [&](size_t unit) { return missing_[unit] == 0; });
  }
  void send(size_t unit) { add(unit, -nbytes_of_[unit]); }
  int64_t nbytes() const { return nbytes_; }

 private:
  void add(size_t unit, int64_t nbytes) {
    nbytes_of_[unit] += nbytes;
    nbytes_ += nbytes;
  }

  const std::vector<UnitLayout>& units_;
  const Places places_;
  std::vector<size_t> missing_;     // gradients of each unit
  std::vector<int64_t> nbytes_of_;  // each unit
  std::set<const GradChunk*> made_;
  int64_t nbytes_ = 0;
};

void check_moments(const Places& places, const ShardPlan& plan, const PlanReportOptions& options) {
  TORCH_CHECK_VALUE(options.activations >= 0 && options.activations <= kMostActivations,
                    "[plan_report] options.activations must be from 0 to ", kMostActivations,
                    "; got ", options.activations);
  TORCH_CHECK_VALUE(options.activations == 0 || options.moments.empty(),
                    "[plan_report] options.activations and options.moments exclude each other");
  const std::set<std::string> ignored(plan.ignored.begin(), plan.ignored.end());
  bool is_backward = false;
  for (const ActivationMoment& moment : options.moments) {
    TORCH_CHECK_VALUE(moment.nbytes >= 0 && moment.nbytes <= kMostActivations,
                      "[plan_report] options.moments: nbytes of '", shortened(moment.name),
                      "' must be from 0 to ", kMostActivations, "; got ", moment.nbytes);
    TORCH_CHECK_VALUE(
        moment.backward || !is_backward,
        "[plan_report] options.moments must be in the order of time, those of forward first; got '",
        shortened(moment.name), "' behind one of backward");
    is_backward = moment.backward;
    for (const auto* names : {&moment.parameters, &moment.gradients})
      for (const std::string& name : *names)
        TORCH_CHECK_VALUE(places.contains(name) || ignored.contains(name),
                          "[plan_report] options.moments: '", shortened(moment.name),
                          "' must name parameters of the model; got '", shortened(name), "'");
  }
}

}  // namespace

PlanReportOptions with_order_of_moments(const std::vector<UnitLayout>& units, const ShardPlan& plan,
                                        const PlanReportOptions& options) {
  const Places places = places_of(units);
  check_moments(places, plan, options);
  PlanReportOptions result = options;
  if (!options.forward_order.empty() || !options.backward_order.empty()) return result;
  for (const ActivationMoment& moment : options.moments) {
    auto& order = moment.backward ? result.backward_order : result.forward_order;
    for (const std::string& name : moment.parameters)
      if (const auto it = places.find(name); it != places.end())
        append_use(order, static_cast<int>(it->second.unit));
  }
  return result;
}

PeakSearch::PeakSearch(const std::vector<UnitLayout>& units, const PlanReportOptions& options,
                       const PassOrder& order, const std::vector<int64_t>& gathered,
                       const std::vector<GradBucket>& buckets)
    : units_(units), options_(options) {
  for (const UnitLayout& unit : units) {
    if (unit.is_replicated) largest_unit_ = std::max(largest_unit_, whole_gradients(unit));
  }
  if (!gathered.empty()) first_gathered_ = gathered.front();
  for (const ActivationMoment& moment : options.moments)
    moments_.push_back({moment.name, moment.nbytes});
  follow(order.joined(), gathered);
  follow_gradients(buckets);
}

// Each moment has the gathered bytes of the positions that its uses move to; without a use, of the
// last one.
void PeakSearch::follow(const UseOrder& order, const std::vector<int64_t>& gathered) {
  const Places places = places_of(units_);
  size_t position = 0;
  for (size_t i = 0; i < moments_.size(); ++i) {
    if (!gathered.empty()) moments_[i].gathered = gathered[position];
    for (const std::string& name : options_.moments[i].parameters) {
      const auto place = places.find(name);
      if (place == places.end() || gathered.empty()) continue;
      const auto next = std::find(order.begin() + static_cast<std::ptrdiff_t>(position),
                                  order.end(), static_cast<int>(place->second.unit));
      if (next == order.end()) continue;  // the options have another order
      position = next - order.begin();
      moments_[i].gathered = std::max(moments_[i].gathered, gathered[position]);
    }
  }
}

// Whole gradients wait until their bucket is complete, and those before it in the order of
// reductions; and then until they are sent: those that the moment before launched may be under way.
void PeakSearch::follow_gradients(const std::vector<GradBucket>& buckets) {
  WaitingGradients waiting(units_);
  size_t next = 0;
  int64_t under_way = 0;
  for (size_t i = 0; i < moments_.size(); ++i) {
    Moment& moment = moments_[i];
    int64_t copied = 0;
    for (const std::string& name : options_.moments[i].gradients)
      copied = std::max(copied, waiting.arrive(name));
    moment.in_flight = waiting.nbytes() + copied + under_way;
    if (!options_.moments[i].backward) continue;
    int64_t sent = 0;
    for (; next < buckets.size() && waiting.has_all(buckets[next]); ++next) {
      for (const size_t unit : buckets[next].units) {
        moment.launched.push_back(unit);
        sent += whole_gradients(units_[unit]);
        waiting.send(unit);
      }
    }
    moment.in_flight_after = waiting.nbytes() + std::min(sent, 2 * largest_unit_);
    under_way = options_.ranks > 1 ? std::min(sent, largest_unit_) : 0;
  }
}

void PeakSearch::find(PlannedRank& rank, const std::vector<int64_t>& reduced) const {
  const ShardMemory& memory = rank.memory;
  MemoryBytes bytes{.parameters = memory.parameters,
                    .gathered = memory.peak_unsharded,
                    .gradients = memory.gradients,
                    .gradients_in_flight = largest_unit_,
                    .optimizer_state = memory.optimizer_state,
                    .master_weights = memory.master_weights,
                    .offloaded = memory.offloaded,
                    .other = options_.activations};
  if (moments_.empty()) {
    rank.peak = bytes;
    return;
  }
  // In the optimizer's step, and the first gathers of the next one.
  bytes.gathered = first_gathered_;
  bytes.gradients_in_flight = 0;
  rank.peak = bytes;
  rank.peak_at = "the optimizer's step";
  for (const int64_t part : reduced) bytes.gradients -= part;  // the rest is always kept
  const auto take = [&](const Moment& moment, int64_t in_flight) {
    bytes.gathered = moment.gathered;
    bytes.gradients_in_flight = in_flight;
    bytes.other = moment.activations;
    if (bytes.total() <= rank.peak.total()) return;
    rank.peak = bytes;
    rank.peak_at = moment.name;
  };
  for (const Moment& moment : moments_) {
    take(moment, moment.in_flight);
    for (const size_t unit : moment.launched) bytes.gradients += reduced[unit];
    if (!moment.launched.empty()) take(moment, moment.in_flight_after);
  }
}

}  // namespace tessera
