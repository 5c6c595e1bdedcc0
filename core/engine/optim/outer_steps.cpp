#include "engine/optim/outer_steps.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/group/encoding.h"
#include "engine/unit/note_write.h"

namespace tessera {

// [Note: Rounds of replicas]
//
// With `ShardPlan::outer` the mesh of a model has no replicate dim: gradients, agreements, clipping
// and skipped steps stay inside a replica. Only here, after every K-th step, does a rank meet its
// peers of the other replicas. With w the part of a rank when the round began, w_r the present part
// in replica r, and R replicas:
//
//   g = (sum over r of (w - w_r)) / R,  b = momentum b + g,  w = w - lr (nesterov ? g + momentum b
//   : b)
//
// Differences are added up, and not values, because they are exact zeros where nothing was trained.
// For a learning rate of 1 without momentum the formula is the mean of the values, and is then
// computed as such: exactly, and without a copy of w.
//
// Start values are taken when a parameter is first trained in a round. Until then it has the values
// of the round's begin, whatever set those: the last average, a checkpoint, the user. So values
// that are loaded between two averages begin a new round. A parameter that a replica did not use
// takes part all the same, with a difference of 0: replicas need not agree on what they used.
namespace {

// Averages in flight. Each holds this rank's part of a unit.
constexpr size_t kMostInFlight = 2;

// Returns the dtype of differences and of momentum.
at::ScalarType sum_dtype(const Unit& unit) {
  return c10::promoteTypes(unit.layout().master_dtype, at::kFloat);
}

int64_t nbytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

}  // namespace

bool OuterSteps::OfUnit::takes_part() const {
  return std::find(slots.begin(), slots.end(), true) != slots.end();
}

OuterSteps::OuterSteps(ShardedState& state)
    : state_(state),
      options_(*state.plan().outer),
      replicas_(*state.plan().replicate_group),
      encoding_(options_.reduce_dtype && !replicas_.sends_to().empty()
                    ? *block_encoding(*options_.reduce_dtype)
                    : Encoding::kPlain) {
  for (const auto& unit : state.units()) {
    units_.push_back({.slots = std::vector<bool>(unit->layout().slots.size(), false),
                      .start = {},
                      .momentum = {},
                      .error = {},
                      .sum_error = {},
                      .label = fmt::format("average of {}", unit->label())});
  }
  begin_round();
}

void OuterSteps::begin_round() {
  position_ = 0;
  overwrites_ = state_.overwrites();
  for (OfUnit& own : units_) std::fill(own.slots.begin(), own.slots.end(), false);
}

int64_t OuterSteps::position() const { return overwrites_ == state_.overwrites() ? position_ : 0; }

void OuterSteps::check_averaged(const char* what) const {
  TORCH_CHECK_VALUE(
      position() == 0, "[", what, "] replicas have made ", position(), " of the ", options_.every,
      " steps between two averages (plan.outer), and have different values. Call this right after "
      "an average, when ShardedOptimizer::steps_since_average() is 0; the next is in ",
      options_.every - position(), " steps");
}

// The mean of the values needs none; rounding is for differences, which are small.
bool OuterSteps::needs_start() const {
  return options_.reduce_dtype || options_.learning_rate != 1 || options_.momentum > 0;
}

// Offloaded if the unit's values are.
at::Tensor OuterSteps::memory_for(const Unit& unit, at::ScalarType dtype) const {
  const at::Tensor& values = unit.updated();
  return unit.master().is_offloaded() ? state_.context().offload->empty(values.numel(), dtype)
                                      : at::empty({values.numel()}, values.options().dtype(dtype));
}

std::vector<int64_t> OuterSteps::offloaded_sizes() const {
  std::vector<int64_t> nbytes;
  const auto add = [&](const Unit& unit, at::ScalarType dtype) {
    nbytes.push_back(unit.updated().numel() * static_cast<int64_t>(c10::elementSize(dtype)));
  };
  for (size_t index = 0; index < units_.size(); ++index) {
    const Unit& unit = *state_.units()[index];
    if (!unit.master().is_offloaded() || !is_trained(unit.layout())) continue;
    if (needs_start() && !units_[index].start.defined()) add(unit, unit.layout().master_dtype);
    if (options_.momentum > 0 && !units_[index].momentum.defined()) add(unit, sum_dtype(unit));
  }
  return nbytes;
}

void OuterSteps::begin_step(const std::vector<Segment>& segments) {
  at::NoGradGuard no_grad;
  if (overwrites_ != state_.overwrites()) begin_round();
  for (const Segment& segment : segments) {
    const auto [index, slot] = segment.place;
    const Unit& unit = *state_.units()[index];
    OfUnit& own = units_[index];
    if (own.slots[slot] || !is_trained(unit.layout().slots[slot])) continue;
    own.slots[slot] = true;
    if (!needs_start()) continue;
    // The values of the unit's other parameters are copied when those are trained.
    const at::Tensor& values = unit.updated();
    if (!own.start.defined() || own.start.scalar_type() != values.scalar_type())
      own.start = memory_for(unit, values.scalar_type());
    const auto [begin, end] = unit.updated_range(unit.layout().slots[slot]);
    if (begin == end) continue;
    const int64_t first = begin - unit.updated_begin();
    own.start.narrow(0, first, end - begin).copy_(values.narrow(0, first, end - begin));
  }
}

void OuterSteps::end_step(std::vector<bool>& changed) {
  const bool averages = is_last();
  ++position_;
  if (!averages) return;
  average(changed);
  begin_round();
}

void OuterSteps::average(std::vector<bool>& changed) {
  at::NoGradGuard no_grad;
  std::deque<Average> in_flight;
  const auto finish_first = [&] {
    finish(in_flight.front());
    in_flight.pop_front();
  };
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!units_[unit].takes_part()) continue;
    changed[unit] = true;  // on the ranks that have no part of it, too
    for (size_t slot = 0; slot < units_[unit].slots.size(); ++slot)
      if (units_[unit].slots[slot]) note_write(state_.units()[unit]->layout().slots[slot]);
    if (state_.units()[unit]->updated().numel() == 0) continue;
    in_flight.push_back(start_average(unit));
    if (in_flight.size() > kMostInFlight) finish_first();
  }
  while (!in_flight.empty()) finish_first();
  if (const auto& memory = state_.context().offload) memory->rest();
}

// Sums are taken on the parameters' device, for which the process group is made.
OuterSteps::Average OuterSteps::start_average(size_t unit) {
  Unit& whole = *state_.units()[unit];
  whole.wait_until_unread();
  const OfUnit& own = units_[unit];
  const at::ScalarType dtype = sum_dtype(whole);
  at::Tensor values = whole.updated().to(dtype, /*non_blocking=*/false, /*copy=*/true);
  if (needs_start()) {
    // Parameters that are not trained have no start: their difference must be 0.
    const at::Tensor difference = at::zeros_like(values);
    for (size_t slot = 0; slot < own.slots.size(); ++slot) {
      const auto [begin, end] = whole.updated_range(whole.layout().slots[slot]);
      if (!own.slots[slot] || begin == end) continue;
      const int64_t first = begin - whole.updated_begin();
      const at::Tensor part = difference.narrow(0, first, end - begin);
      part.copy_(own.start.narrow(0, first, end - begin));
      part.sub_(values.narrow(0, first, end - begin));
    }
    values = difference;
  }
  values = values.to(whole.layout().device);
  Average average{unit, values, nullptr, {}, {}};
  if (encoding_ != Encoding::kPlain)
    start_rounded(average);
  else if (replicas_.size() > 1)
    average.work = replicas_.all_reduce(values, ReduceOp::kSum, {own.label, Channel::kParams});
  return average;
}

// An all-reduce rounds at each hop. Here each value is rounded once on its way to the sum, which
// one replica takes, and the sum once.
void OuterSteps::start_rounded(Average& average) {
  OfUnit& own = units_[average.unit];
  const int64_t numel = average.values.numel(), size = replicas_.size();
  const int64_t blocks = (numel + kEncodedBlock - 1) / kEncodedBlock;
  for (int64_t r = 0; r <= size; ++r)
    average.bounds.push_back(std::min(numel, blocks * r / size * kEncodedBlock));
  const int64_t begin = average.bounds[replicas_.rank()];
  average.sums =
      at::empty({average.bounds[replicas_.rank() + 1] - begin}, average.values.options());
  if (state_.plan().precision.error_feedback && !own.error) {
    own.error = std::make_shared<at::Tensor>();
    own.sum_error = at::zeros_like(average.sums);
  }
  average.work =
      replicas_.reduce_scatter(average.sums, {{0, average.values, numel}}, average.bounds,
                               ReduceScatterOptions{.encoding = encoding_, .error = own.error},
                               {own.label, Channel::kParams});
}

void OuterSteps::gather_rounded(Average& average) {
  const OfUnit& own = units_[average.unit];
  average.values = at::empty_like(average.values);  // the old ones may still be sent
  replicas_
      .all_gather(average.values, rounded_by(encoding_, average.sums, own.sum_error),
                  average.bounds, {own.label, Channel::kParams}, encoding_)
      ->wait();
}

void OuterSteps::finish(Average& average) {
  Unit& unit = *state_.units()[average.unit];
  OfUnit& own = units_[average.unit];
  if (average.work) average.work->wait();
  if (average.sums.defined()) gather_rounded(average);
  const at::Tensor& updated = unit.updated();
  const at::Tensor mean = average.values.div_(replicas_.size()).to(updated.device());
  const at::Tensor values = needs_start() ? new_values(unit, own, mean) : mean;
  for (size_t slot = 0; slot < own.slots.size(); ++slot) {
    const auto [begin, end] = unit.updated_range(unit.layout().slots[slot]);
    if (!own.slots[slot] || begin == end) continue;
    const int64_t first = begin - unit.updated_begin();
    updated.narrow(0, first, end - begin).copy_(values.narrow(0, first, end - begin));
  }
  unit.publish();
}

// The step of SGD from the start values, for the gradient `mean`.
at::Tensor OuterSteps::new_values(const Unit& unit, OfUnit& own, const at::Tensor& mean) const {
  at::Tensor direction = mean;
  if (options_.momentum > 0) {
    if (!own.momentum.defined()) own.momentum = memory_for(unit, mean.scalar_type()).zero_();
    own.momentum = own.momentum.to(mean.device());  // the unit may have been brought back to it
    own.momentum.mul_(options_.momentum).add_(mean);
    direction =
        options_.nesterov ? mean.add(own.momentum, /*alpha=*/options_.momentum) : own.momentum;
  }
  return own.start.to(mean.options()).sub(direction, /*alpha=*/options_.learning_rate);
}

int64_t OuterSteps::nbytes() const {
  int64_t nbytes = 0;
  for (const OfUnit& own : units_)
    nbytes += nbytes_of(own.start) + nbytes_of(own.momentum) + nbytes_of(own.sum_error) +
              (own.error ? nbytes_of(*own.error) : 0);
  return nbytes;
}

int64_t OuterSteps::offloaded_nbytes() const {
  int64_t nbytes = 0;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (state_.units()[unit]->master().is_offloaded())
      nbytes += nbytes_of(units_[unit].start) + nbytes_of(units_[unit].momentum);
  }
  return nbytes;
}

// Calls `f` with the unit, name and range, in elements of this rank's part of the unit, of each
// part of a parameter that this rank has.
template <class F>
void OuterSteps::for_each_part(F&& f) const {
  for (size_t index = 0; index < units_.size(); ++index) {
    const Unit& unit = *state_.units()[index];
    for (const ParamSlot& slot : unit.layout().slots) {
      const auto [begin, end] = unit.updated_range(slot);
      if (begin == end) continue;
      const int64_t first = begin - unit.updated_begin();
      f(index, fmt::format("{}:{}:{}", slot.name(), begin - slot.offset, end - slot.offset), first,
        end - begin);
    }
  }
}

std::map<std::string, at::Tensor> OuterSteps::momentum() const {
  std::map<std::string, at::Tensor> result;
  for_each_part([&](size_t unit, const std::string& name, int64_t first, int64_t numel) {
    const at::Tensor& momentum = units_[unit].momentum;
    if (momentum.defined()) result[name] = momentum.narrow(0, first, numel);
  });
  return result;
}

void OuterSteps::check_momentum(const std::map<std::string, at::Tensor>& saved) const {
  size_t known = 0;
  for_each_part([&](size_t, const std::string& name, int64_t, int64_t numel) {
    const auto it = saved.find(name);
    if (it != saved.end() && it->second.numel() == numel) ++known;
  });
  TORCH_CHECK_VALUE(
      known == saved.size(),
      "[load_checkpoint] the momentum of plan.outer is kept by the ranks' parts of the parameters, "
      "and the checkpoint has other parts: it was saved with another level, partition or units. "
      "Load it with those of the save, or the model alone, without the optimizer");
}

void OuterSteps::set_momentum(const std::map<std::string, at::Tensor>& saved) {
  at::NoGradGuard no_grad;
  begin_round();
  for (OfUnit& own : units_) own.error.reset(), own.sum_error.reset();
  if (options_.momentum == 0) return;
  for (OfUnit& own : units_)
    if (own.momentum.defined()) own.momentum.zero_();
  for_each_part([&](size_t index, const std::string& name, int64_t first, int64_t numel) {
    const auto it = saved.find(name);
    if (it == saved.end()) return;
    const Unit& unit = *state_.units()[index];
    at::Tensor& momentum = units_[index].momentum;
    if (!momentum.defined()) momentum = memory_for(unit, sum_dtype(unit)).zero_();
    momentum.narrow(0, first, numel).copy_(it->second);
  });
}

}  // namespace tessera
