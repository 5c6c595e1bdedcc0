#include <c10/util/Exception.h>
#include <tessera/planner/step_time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <optional>
#include <utility>

#include "comm/fake/link_clock.h"
#include "comm/group/encoding.h"
#include "comm/group/sent_bytes.h"
#include "engine/grad/grad_bucket.h"
#include "engine/grad/longest_pause.h"
#include "engine/grad/reducer.h"
#include "planner/planned_units.h"

namespace tessera {
namespace {

constexpr size_t kGathers = 0, kReductions = 1, kAgreement = 2;  // channels

// As many steps until each begins with the gathers that the one before it has left, and their time
// is the same.
constexpr int kSteps = 4;

void check_numbers(const StepTimeOptions& options) {
  for (const auto& [name, number] :
       {std::pair("hosts", options.hosts), std::pair("ranks_per_host", options.ranks_per_host)})
    TORCH_CHECK_VALUE(number >= 1, "[step_time] options.", name, " must be at least 1; got ",
                      number);
  TORCH_CHECK_VALUE(int64_t{options.hosts} * options.ranks_per_host <= 1 << 20,
                    "[step_time] there must be at most ", 1 << 20, " ranks; got ", options.hosts,
                    " x ", options.ranks_per_host);
  for (const auto& [name, number] :
       {std::pair("link_bandwidth", options.link_bandwidth),
        std::pair("link_latency", options.link_latency),
        std::pair("host_bandwidth", options.host_bandwidth),
        std::pair("compute_seconds", options.compute_seconds),
        std::pair("optimizer_seconds", options.optimizer_seconds),
        std::pair("processor_seconds_per_byte", options.processor_seconds_per_byte)})
    TORCH_CHECK_VALUE(std::isfinite(number) && number >= 0, "[step_time] options.", name,
                      " must be finite and not negative; got ", number);
  TORCH_CHECK_VALUE(options.backward_share >= 0 && options.backward_share <= 1,
                    "[step_time] options.backward_share must be from 0 to 1; got ",
                    options.backward_share);
  TORCH_CHECK_VALUE(options.payload_share > 0 && options.payload_share <= 1,
                    "[step_time] options.payload_share must be above 0, and at most 1; got ",
                    options.payload_share);
}

LinkClock::Rates rates_of(const StepTimeOptions& options) {
  return {
      .bandwidth = options.link_bandwidth * options.payload_share,
      .latency = options.link_latency,
      // A rank sends its part of the host's bytes.
      .processor_seconds_per_byte = options.processor_seconds_per_byte / options.ranks_per_host};
}

// A rank in training, of a job in which all ranks are equal.
class TimeLine {
 public:
  TimeLine(std::vector<UnitLayout> units, const ShardPlan& plan, const StepTimeOptions& options)
      : units_(std::move(units)),
        options_(options),
        level_(plan.level),
        shares_memory_(options.hosts == 1),
        pass_(order_of_use(units_, options.forward_order, options.backward_order)),
        clock_(rates_of(options)),
        gathers_(units_.size()) {
    const int count = static_cast<int>(units_.size());
    const std::vector<int64_t> nbytes =
        shares_memory_ ? std::vector<int64_t>(count) : freed_nbytes(units_, options.ranks());
    order_ = pass_.joined();
    steps_ = plan_residency(order_, nbytes, plan.resident_bytes, plan.prefetch);
    std::vector<const UnitLayout*> layouts;
    for (const UnitLayout& unit : units_) layouts.push_back(&unit);
    for (const GradBucket& bucket :
         cut_buckets(layouts, expected_reduction_order(pass_.forward, count), plan.bucket_bytes)) {
      if (!is_trainable(units_[bucket.units.front()])) continue;
      buckets_.push_back(bucket);
      in_flight_limit_ = std::max(in_flight_limit_, 2 * nbytes_of(bucket));
    }
  }

  StepTime step() {
    StepTime time;
    const double begin = clock_.now(), sent = clock_.sent_nbytes();
    forward();
    const double forward_end = clock_.now();
    backward();
    const double backward_end = clock_.now();
    optimize();
    time.forward = forward_end - begin;
    time.backward = backward_end - forward_end;
    time.optimizer = clock_.now() - backward_end;
    time.seconds = clock_.now() - begin;
    time.compute = options_.compute_seconds + optimizer_seconds();
    time.link_nbytes = clock_.sent_nbytes() - sent;
    const double bandwidth = options_.link_bandwidth * options_.payload_share;
    time.link = bandwidth > 0 ? time.link_nbytes / bandwidth : 0;
    return time;
  }

 private:
  // The bytes of a buffer of which each host sends its part to all others.
  double over_link(int64_t nbytes) const {
    return static_cast<double>(nbytes) * (options_.hosts - 1) / options_.hosts;
  }
  // The time of a rank that reads or copies so many bytes of its host's memory.
  double in_host(int64_t nbytes) const {
    if (options_.ranks_per_host == 1 || options_.host_bandwidth == 0) return 0;
    return static_cast<double>(nbytes) / options_.host_bandwidth;
  }
  int64_t nbytes_of(const GradBucket& bucket) const {
    int64_t nbytes = 0;
    for (const size_t unit : bucket.units) nbytes += units_[unit].nbytes();
    return nbytes;
  }
  double optimizer_seconds() const {
    return options_.optimizer_seconds / (level_ == ShardLevel::kNone ? 1 : options_.ranks());
  }

  // Nothing is copied inside the host: its ranks share the buffer.
  void gather(int unit) {
    const UnitLayout& layout = units_[unit];
    gathers_[unit] =
        clock_.start({.channel = kGathers,
                      .nbytes = over_link(encoded_nbytes(layout.gather_encoding, layout.numel(),
                                                         layout.gather_dtype))});
  }

  void use(size_t position, double seconds) {
    // The last use of forward is the first of backward, at one position.
    for (; reached_ <= position; ++reached_) {
      for (const int unit : steps_[reached_].gather) {
        // The first ones were started in the step before.
        if (reached_ > 0 || !gathers_[unit]) gather(unit);
      }
    }
    if (auto& started = gathers_[order_[position]]) clock_.wait(*started);
    clock_.compute(seconds);
  }

  // Uses the units of a pass, whose computation takes `seconds`; calls `done` after each.
  template <class Done>
  void use_all(const UseOrder& order, size_t first, double seconds, Done done) {
    double elements = 0;
    for (const int unit : order) elements += static_cast<double>(units_[unit].numel());
    for (size_t i = 0; i < order.size(); ++i) {
      const double share =
          elements > 0 ? static_cast<double>(units_[order[i]].numel()) / elements : 0;
      use(first + i, seconds * share);
      done(i);
    }
  }

  void forward() {
    const double seconds = options_.compute_seconds * (1 - options_.backward_share);
    use_all(pass_.forward, 0, seconds, [](size_t) {});
  }

  void backward() {
    std::vector<bool> is_complete(units_.size(), false);
    size_t next = 0;
    const size_t first = order_.size() - pass_.backward.size();
    const double seconds = options_.compute_seconds * options_.backward_share;
    use_all(pass_.backward, first, seconds, [&](size_t i) {
      const int unit = pass_.backward[i];
      const bool is_last = std::find(pass_.backward.begin() + static_cast<ptrdiff_t>(i) + 1,
                                     pass_.backward.end(), unit) == pass_.backward.end();
      is_complete[unit] = is_last;
      for (; next < buckets_.size(); ++next) {
        const auto& members = buckets_[next].units;
        if (!std::ranges::all_of(members, [&](size_t member) { return is_complete[member]; }))
          break;
        reduce(buckets_[next]);
      }
    });
    clock_.wait(agree());
    for (; next < buckets_.size(); ++next) reduce(buckets_[next]);
    for (auto& started : gathers_) started.reset();
    reached_ = 0;
  }

  size_t agree() {
    int64_t slots = 0;
    for (const UnitLayout& unit : units_) slots += static_cast<int64_t>(unit.slots.size());
    const int64_t nbytes = Reducer::agreement_nbytes(slots);
    const bool at_once = nbytes <= static_cast<int64_t>(kMaxOneRoundBytes);
    // Small ones are sent by each rank of a host; of large ones, each sends its part.
    const int64_t times = at_once ? options_.ranks_per_host : 1;
    return clock_.start(
        {.channel = kAgreement,
         .nbytes = static_cast<double>(times * all_reduce_bytes(nbytes, options_.hosts)),
         .rounds = at_once ? 1 : 2});
  }

  void reduce(const GradBucket& bucket) {
    int64_t sent = 0;
    for (const size_t unit : bucket.units)
      sent += encoded_nbytes(units_[unit].reduce_encoding, units_[unit].numel(),
                             units_[unit].reduce_dtype);
    const bool gathers = gathers_in_reduction(bucket);
    if (gathers) sent += gathered_nbytes(units_[bucket.units.front()]);
    const size_t reduction = clock_.start({.channel = kReductions,
                                           .host_seconds = in_host(sent),
                                           .nbytes = over_link(sent),
                                           .rounds = gathers ? 2 : 1});
    reductions_.push_back(reduction);
    in_flight_.emplace_back(reduction, nbytes_of(bucket));
    in_flight_nbytes_ += in_flight_.back().second;
    limit_in_flight();
  }

  void limit_in_flight() {
    double longest = std::chrono::duration<double>(kLongestPause).count();
    while (!in_flight_.empty()) {
      const auto [oldest, nbytes] = in_flight_.front();
      if (!clock_.is_over(oldest)) {
        if (in_flight_nbytes_ <= in_flight_limit_ || longest <= 0) return;
        const double begin = clock_.now();
        clock_.pause(oldest, longest);
        longest -= clock_.now() - begin;
        if (!clock_.is_over(oldest)) return;
      }
      in_flight_nbytes_ -= nbytes;
      in_flight_.pop_front();
    }
  }

  void optimize() {
    std::vector<size_t> gathers;
    for (size_t i = 0; i < reductions_.size(); ++i) {
      clock_.wait(reductions_[i]);
      if (level_ == ShardLevel::kNone && !gathers_in_reduction(buckets_[i]))
        gather_reduced(buckets_[i], gathers);
    }
    for (const size_t gather : gathers) clock_.wait(gather);
    reductions_.clear();
    in_flight_.clear();
    in_flight_nbytes_ = 0;
    clock_.compute(optimizer_seconds());
    if (!shares_memory_) gather_updated();
  }

  // See `UnitGradients::gathers_in_reduction()`. Ranks of one host are assumed to share memory.
  bool gathers_in_reduction(const GradBucket& bucket) const {
    return !shares_memory_ && bucket.units.size() == 1 &&
           units_[bucket.units.front()].may_gather_sums();
  }

  // At kNone: the bytes of a unit's sums, which all ranks get.
  static int64_t gathered_nbytes(const UnitLayout& unit) {
    return encoded_nbytes(unit.reduce_encoding, unit.numel(), unit.master_dtype);
  }

  // Behind the reductions that are still queued.
  void gather_reduced(const GradBucket& bucket, std::vector<size_t>& gathers) {
    if (options_.ranks() == 1) return;
    for (const size_t unit : bucket.units) {
      const int64_t nbytes = gathered_nbytes(units_[unit]);
      gathers.push_back(clock_.start(
          {.channel = kReductions, .host_seconds = in_host(nbytes), .nbytes = over_link(nbytes)}));
    }
  }

  void gather_updated() {
    for (const int unit : order_) {
      const bool is_stale = units_[unit].level != ShardLevel::kNone && is_trainable(units_[unit]) &&
                            !frees(units_[unit], options_.ranks());
      if (is_stale && !gathers_[unit]) gather(unit);
    }
    if (steps_.empty()) return;
    for (const int unit : steps_.front().gather) gather(unit);
  }

  const std::vector<UnitLayout> units_;
  const StepTimeOptions& options_;
  const ShardLevel level_;
  const bool shares_memory_;
  const PassOrder pass_;
  LinkClock clock_;
  UseOrder order_;
  std::vector<ResidencyStep> steps_;
  size_t reached_ = 0;               // the first position whose gathers are not started
  std::vector<GradBucket> buckets_;  // of trainable units, in the order of their reductions
  std::vector<std::optional<size_t>> gathers_;        // the last one of each unit in this step
  std::vector<size_t> reductions_;                    // of this step
  std::deque<std::pair<size_t, int64_t>> in_flight_;  // and their bytes, the oldest first
  int64_t in_flight_nbytes_ = 0, in_flight_limit_ = 0;
};

}  // namespace

StepTime step_time(const std::vector<ParameterSize>& parameters, const ShardPlan& wanted,
                   const StepTimeOptions& options) {
  check_numbers(options);
  const ShardPlan plan = foreseeable_plan(wanted, /*sends_nothing=*/options.hosts == 1);
  TORCH_CHECK_NOT_IMPLEMENTED(plan.offload == Offload::kNone,
                              "[step_time] plan.offload must be kNone: the time of a step in host "
                              "memory or files is not known");
  TimeLine line(planned_units(parameters, plan, options.ranks()), plan, options);
  for (int step = 1; step < kSteps; ++step) line.step();
  return line.step();
}

}  // namespace tessera
