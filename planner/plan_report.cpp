#include <c10/util/Exception.h>
#include <tessera/planner/plan_report.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/files/untrusted.h"
#include "engine/model/memory_count.h"
#include "engine/optim/cpu_adam_step.h"
#include "engine/optim/optimizer_parameters.h"
#include "engine/optim/param_state.h"
#include "engine/optim/small_state.h"
#include "engine/optim/state_shape.h"
#include "engine/unit/placement.h"
#include "planner/paper_job.h"
#include "trace/memory_timeline.h"

namespace tessera {
namespace {

// Ranks of which each is run, where all differ.
constexpr int kMostCompared = 64;
// Leaves room for the sum of all kinds.
constexpr int64_t kMostActivations = int64_t{1} << 59;

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

int64_t item_size(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// Returns the bytes of optimizer state for `numel` elements of a parameter.
int64_t state_nbytes(const PlanReportOptions& options, const ParamSlot& slot, int64_t numel) {
  if (options.muon) {
    const bool is_matrix =
        takes_muon(slot.name(), static_cast<int64_t>(slot.global_sizes().size()), *options.muon);
    return numel * (is_matrix ? 1 : 2) *
           std::max(item_size(slot.master_dtype), item_size(at::kFloat));
  }
  const at::ScalarType kept = options.state_dtype
                                  ? moment_dtype(slot.master_dtype, *options.state_dtype)
                                  : slot.master_dtype;
  const int64_t scales = kept == at::kByte ? blocks_of(numel) * item_size(at::kFloat) : 0;
  return options.state_tensors * (numel * item_size(kept) + scales);
}

bool is_trainable(const UnitLayout& unit) { return unit.slots.front().requires_grad; }

// Returns the index of each parameter by its names.
std::map<std::string, size_t> indices_of(const std::vector<ParameterSize>& parameters) {
  std::map<std::string, size_t> indices;
  for (size_t i = 0; i < parameters.size(); ++i)
    for (const std::string& name : parameters[i].names) indices.emplace(name, i);
  return indices;
}

void check_moments(const std::vector<ParameterSize>& parameters, const PlanReportOptions& options) {
  TORCH_CHECK_VALUE(options.activations >= 0 && options.activations <= kMostActivations,
                    "[plan_report] options.activations must be from 0 to ", kMostActivations,
                    "; got ", options.activations);
  TORCH_CHECK_VALUE(options.activations == 0 || options.moments.empty(),
                    "[plan_report] options.activations and options.moments exclude each other");
  TORCH_CHECK_VALUE(
      options.moments.empty() || (options.forward_order.empty() && options.backward_order.empty()),
      "[plan_report] options.moments tell the order of use, and exclude options.forward_order and "
      "backward_order");
  const auto indices = indices_of(parameters);
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
        TORCH_CHECK_VALUE(indices.contains(name), "[plan_report] options.moments: '",
                          shortened(moment.name), "' must name parameters of the model; got '",
                          shortened(name), "'");
  }
}

// One rank, in its observed step.
class PlannedStep final : public PaperObserver, public MemoryListener {
 public:
  PlannedStep(const std::vector<ParameterSize>& parameters, const ShardPlan& plan,
              const PlanReportOptions& options, int rank)
      : options_(options),
        result_{.rank = rank},
        job_(parameters, plan,
             {.size = options.ranks,
              .rank = rank,
              .shares_memory = options.shares_memory,
              .sends = !options.shares_memory},
             options.replicas, *this) {
    const std::vector<PaperMoment> moments = moments_of(parameters);
    job_.step(moments);  // which shows the order of use
    observe(moments);
  }

  const PlannedRank& result() const { return result_; }
  const ShardedState& state() const { return job_.state(); }

 private:
  using Entry = CollectiveCounts::Entry;

  std::vector<PaperMoment> moments_of(const std::vector<ParameterSize>& parameters) const {
    if (options_.moments.empty())
      return moments_in_order(job_, options_.forward_order, options_.backward_order);
    const auto indices = indices_of(parameters);
    std::vector<PaperMoment> moments;
    for (const ActivationMoment& given : options_.moments) {
      PaperMoment& moment = moments.emplace_back(PaperMoment{.backward = given.backward});
      for (const std::string& name : given.parameters)
        if (const auto unit = job_.unit_of(indices.at(name))) append_use(moment.uses, *unit);
      for (const std::string& name : given.gradients) moment.gradients.push_back(indices.at(name));
    }
    return moments;
  }

  void observe(const std::vector<PaperMoment>& moments) {
    ShardedState& state = job_.state();
    state.context().peak_unsharded_bytes = state.context().unsharded_bytes;
    count_state();
    for (size_t unit = 0; unit < state.units().size(); ++unit) {
      units_.emplace(state.units()[unit]->layout().name, unit);
      held_.emplace_back();
      recount(unit);
    }
    is_observed_ = true;
    state.context().watch.add(*this);
    job_.step(moments);
    state.context().watch.remove(*this);
    result_.memory = job_.memory();
    result_.memory.peak_in_flight = 0;
    (offloads() ? result_.memory.offloaded : result_.memory.optimizer_state) += state_nbytes_;
    if (options_.shares_memory) result_.traffic = {};
    if (!options_.moments.empty()) return;
    const ShardMemory& memory = result_.memory;
    result_.peak = {.parameters = memory.parameters,
                    .gathered = memory.peak_unsharded,
                    .gradients = memory.gradients,
                    .gradients_in_flight = most_in_flight_,
                    .optimizer_state = memory.optimizer_state,
                    .master_weights = memory.master_weights,
                    .offloaded = memory.offloaded,
                    .other = options_.activations};
  }

  bool offloads() const { return job_.state().context().offload != nullptr; }

  // The optimizer on paper keeps none.
  void count_state() {
    for (const auto& unit : job_.state().units()) {
      for (const ParamSlot& slot : unit->layout().slots) {
        const auto [begin, end] = unit->updated_range(slot);
        if (slot.requires_grad) state_nbytes_ += state_nbytes(options_, slot, end - begin);
      }
    }
  }

  // A reduction holds what it sends until the next one begins, as it may take that long; with one
  // rank, or where no moments are known, until the moment is over.
  WorkPtr on_collective(const ProcessGroup& ranks, const Collective& collective,
                        int64_t sent) override {
    if (!is_observed_) return nullptr;
    if (const auto* const reduction = std::get_if<ReduceScatter>(&collective.call))
      send(reduction->pieces);
    Entry& entry = entry_of(collective, &ranks == &job_.state().mesh().replicate());
    entry.calls += 1;
    entry.bytes_sent += sent;
    return nullptr;
  }

  Entry& entry_of(const Collective& collective, bool of_replicas) {
    PlannedTraffic& traffic = result_.traffic;
    if (std::holds_alternative<ReduceScatter>(collective.call)) return traffic.reduce;
    if (std::holds_alternative<AllReduce>(collective.call)) {
      if (!of_replicas) return traffic.agree;
      return collective.tag.channel == Channel::kGrads ? traffic.replicate : traffic.agree_replicas;
    }
    if (collective.tag.channel == Channel::kGrads) return traffic.gather_reduced;
    if (job_.phase() == PaperJob::Phase::kBackward) return traffic.gather_backward;
    const bool is_updated =
        job_.phase() == PaperJob::Phase::kUpdate && stays(collective.tag.subject);
    return is_updated ? traffic.gather_updated : traffic.gather_forward;
  }

  // Returns true for a unit that is not freed between uses.
  bool stays(std::string_view name) const {
    const auto unit = units_.find(name);
    return unit != units_.end() && !job_.state().units()[unit->second]->frees();
  }

  void on_moment(size_t index) override {
    moment_ = index;
    const bool may_be_late = options_.ranks > 1 && !options_.moments.empty();
    if (!may_be_late) send({});
    take(bytes_);
  }
  void on_step() override { send({}); }

  // Frees what was sent before.
  void send(std::vector<Piece> pieces) {
    sending_ = std::move(pieces);
    std::erase_if(reducing_, [this](size_t unit) {
      recount(unit);
      return held_[unit].gradients_in_flight == 0;
    });
  }

  void before_change() override {}
  void on_memory(MemoryEvent event, const std::string& name) override {
    const auto unit = units_.find(name);
    if (unit == units_.end()) return take(bytes_);
    if (event == MemoryEvent::kReductionStarted) reducing_.push_back(unit->second);
    recount(unit->second);
    take(bytes_, event == MemoryEvent::kGradientMade ? job_.copied_gradient() : 0);
  }

  void recount(size_t unit) {
    const MemoryBytes now = held_by(job_.state(), unit), before = std::exchange(held_[unit], now);
    for (const MemoryKind& kind : kMemoryKinds)
      bytes_.*kind.bytes += now.*kind.bytes - before.*kind.bytes;
  }

  void take(MemoryBytes bytes, int64_t copied_gradient = 0) {
    most_in_flight_ = std::max(most_in_flight_, bytes.gradients_in_flight);
    bytes.gradients_in_flight += copied_gradient;
    const bool is_update = job_.phase() == PaperJob::Phase::kUpdate;
    if (options_.moments.empty() || (!is_update && moment_ == options_.moments.size())) return;
    (offloads() ? bytes.offloaded : bytes.optimizer_state) += state_nbytes_;
    bytes.other = is_update ? 0 : options_.moments[moment_].nbytes;
    if (bytes.total() <= result_.peak.total()) return;
    result_.peak = bytes;
    result_.peak_at = is_update ? "the optimizer's step" : options_.moments[moment_].name;
  }

  const PlanReportOptions& options_;
  PlannedRank result_;
  bool is_observed_ = false;
  std::map<std::string, size_t, std::less<>> units_;  // by name
  std::vector<MemoryBytes> held_;                     // by each
  MemoryBytes bytes_;                                 // and by all
  int64_t state_nbytes_ = 0;
  size_t moment_ = 0;
  std::vector<Piece> sending_;
  std::vector<size_t> reducing_;  // units of which they are
  int64_t most_in_flight_ = 0;
  PaperJob job_;
};

// The rank that updates most, the lowest of equals.
int fullest_rank(const ShardedState& state) {
  const int ranks = state.process_group().size();
  std::vector<int64_t> nbytes(ranks, 0);
  for (const auto& unit : state.units()) {
    const UnitLayout& layout = unit->layout();
    if (layout.group == 0)
      for (int rank = 0; rank < ranks; ++rank)
        nbytes[rank] += layout.shard_numel(rank) * item_size(layout.master_dtype);
  }
  return static_cast<int>(std::ranges::max_element(nbytes) - nbytes.begin());
}

double zero_paper_bytes(const ShardedState& model, ShardLevel level,
                        const PlanReportOptions& options) {
  double parameters = 0, gradients = 0, state = 0;
  for (const auto& own : model.units()) {
    const UnitLayout& unit = own->layout();
    const auto item = static_cast<double>(item_size(unit.dtype));
    const int64_t master_item = unit.has_master() ? item_size(unit.master_dtype) : 0;
    for (const ParamSlot& slot : unit.slots) {
      const auto numel = static_cast<double>(slot.numel);
      parameters += numel * item;
      if (!is_trainable(unit)) continue;
      gradients += numel * item;
      state +=
          static_cast<double>(state_nbytes(options, slot, slot.numel) + slot.numel * master_item);
    }
  }
  if (level >= ShardLevel::kOptimizerState) state /= options.ranks;
  if (level >= ShardLevel::kGradients) gradients /= options.ranks;
  if (level >= ShardLevel::kParameters) parameters /= options.ranks;
  return parameters + gradients + state;
}

void list_units(PlanReport& report, const ShardedState& state) {
  for (const auto& own : state.units()) {
    const UnitLayout& unit = own->layout();
    report.units.push_back(
        {unit.name, unit.numel(), unit.nbytes(), unit.level, is_trainable(unit), {}, {}});
    PlannedUnit& planned = report.units.back();
    for (size_t rank = 0; rank + 1 < unit.bounds.size(); ++rank)
      planned.shards.push_back(unit.shard_numel(static_cast<int>(rank)));
    for (const ParamSlot& slot : unit.slots) {
      report.parameters += slot.numel;
      if (slot.cut == Cut::kAnywhere) continue;
      const int owner = owner_of(unit, slot);
      planned.cuts.push_back(
          {slot.name(), slot.cut, slot.block, owner, cut_text(slot.cut, slot.block, owner)});
    }
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
                       const PlanReportOptions& options) {
  check_options(options);
  check_moments(parameters, options);
  const ShardPlan plan = foreseeable_plan(parameters, wanted, options.ranks);
  std::map<int, PlannedStep> steps;
  const auto step = [&](int rank) -> const PlannedStep& {
    return steps.try_emplace(rank, parameters, plan, options, rank).first->second;
  };
  PlanReport report;
  report.rank = step(options.rank).result();
  const ShardedState& state = step(options.rank).state();
  list_units(report, state);
  report.zero_paper_bytes = zero_paper_bytes(state, plan.level, options);
  // Shards that are cut evenly are equal except for the padding, which only the last ones have, and
  // which is not sent in blocks.
  const bool has_blocks = std::ranges::any_of(state.units(), [](const auto& unit) {
    return unit->layout().reduce_encoding != Encoding::kPlain;
  });
  for (const int rank : {0, fullest_rank(state), has_blocks ? options.ranks - 1 : 0}) step(rank);
  const bool is_even = plan.partition == Partition::kFlatEven && plan.cuts.empty();
  if (!is_even && options.ranks <= kMostCompared)
    for (int rank = 0; rank < options.ranks; ++rank) step(rank);
  report.fullest = report.busiest = step(0).result();
  for (const auto& [rank, other] : steps) {
    const PlannedRank& result = other.result();
    if (result.kept() > report.fullest.kept()) report.fullest = result;
    if (result.traffic.bytes_sent() > report.busiest.traffic.bytes_sent()) report.busiest = result;
  }
  return report;
}

std::vector<ParameterSize> parameter_sizes(const torch::nn::Module& module) {
  return parameter_sizes(named_tensors(module.named_parameters()));
}

std::vector<ParameterSize> parameter_sizes(const std::vector<NamedTensor>& parameters) {
  std::vector<ParameterSize> sizes;
  for (ParamSlot& slot : collect_parameters(parameters))
    sizes.push_back({std::move(slot.names), std::move(slot.sizes), slot.dtype, slot.requires_grad});
  return sizes;
}

std::vector<CutRule> muon_cuts(const std::vector<ParameterSize>& parameters,
                               const std::vector<std::string>& exceptions) {
  std::vector<CutRule> rules;
  for (const auto& [names, shape, dtype, trainable] : parameters)
    if (takes_muon(names.front(), static_cast<int64_t>(shape.size()), exceptions))
      rules.push_back({names.front(), shape.size() == 2 ? Cut::kWhole : Cut::kRows});
  return rules;
}

int state_tensors_of(torch::optim::Optimizer& optimizer) {
  std::set<int64_t> counts;
  for (auto& param_group : optimizer.param_groups())
    counts.insert(
        std::ranges::count_if(state_tensors(optimizer, param_group, at::kFloat, {}),
                              [](const StateTensor& tensor) { return !is_scale(tensor.name); }));
  TORCH_CHECK_VALUE(counts.size() == 1,
                    "[state_tensors_of] the optimizer must keep the same number of tensors per "
                    "parameter in all param groups; got ",
                    counts.size(), " different numbers");
  return static_cast<int>(*counts.begin());
}

}  // namespace tessera
