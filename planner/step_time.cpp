#include <c10/util/Exception.h>
#include <tessera/planner/step_time.h>

#include <chrono>
#include <cmath>
#include <deque>
#include <optional>
#include <utility>

#include "comm/fake/link_clock.h"
#include "comm/group/encoding.h"
#include "comm/group/sent_bytes.h"
#include "planner/paper_job.h"

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
class TimeLine final : public PaperObserver {
 public:
  TimeLine(const std::vector<ParameterSize>& parameters, const ShardPlan& plan,
           const StepTimeOptions& options)
      : options_(options),
        is_one_host_(options.hosts == 1),
        clock_(rates_of(options)),
        job_(parameters, plan,
             {.size = options.ranks(),
              .shares_memory = options.ranks_per_host > 1,
              .sends = !is_one_host_},
             /*replicas=*/1, *this),
        moments_(moments_in_order(job_, options.forward_order, options.backward_order)) {
    for (const PaperMoment& moment : moments_) elements_of_pass(moment) += elements_of(moment);
  }

  StepTime step() {
    StepTime time;
    const double begin = clock_.now(), sent = clock_.sent_nbytes();
    job_.step(moments_);
    time.forward = forward_end_ - begin;
    time.backward = backward_end_ - forward_end_;
    time.optimizer = clock_.now() - backward_end_;
    time.seconds = clock_.now() - begin;
    time.compute = options_.compute_seconds + optimizer_seconds();
    time.link_nbytes = clock_.sent_nbytes() - sent;
    const double bandwidth = options_.link_bandwidth * options_.payload_share;
    time.link = bandwidth > 0 ? time.link_nbytes / bandwidth : 0;
    return time;
  }

 private:
  // A collective on the way.
  struct Transfer final : Work {
    Transfer(LinkClock& clock, size_t number) : clock(clock), number(number) {}
    void wait() override { clock.wait(number); }
    bool is_completed() override { return clock.is_over(number); }
    LinkClock& clock;
    const size_t number;
  };

  double elements_of(const PaperMoment& moment) const {
    return static_cast<double>(job_.state().units()[moment.uses.front()]->layout().numel());
  }
  double& elements_of_pass(const PaperMoment& moment) { return elements_[moment.backward ? 1 : 0]; }
  double optimizer_seconds() const {
    const bool is_whole = job_.state().plan().level == ShardLevel::kNone;
    return options_.optimizer_seconds / (is_whole ? 1 : options_.ranks());
  }

  // The bytes of a buffer of which each host sends its part to all others.
  double over_link(int64_t nbytes) const {
    return static_cast<double>(nbytes) * (options_.hosts - 1) / options_.hosts;
  }
  // The time of a rank that reads or copies so many bytes of its host's memory.
  double in_host(int64_t nbytes) const {
    if (options_.ranks_per_host == 1 || options_.host_bandwidth == 0) return 0;
    return static_cast<double>(nbytes) / options_.host_bandwidth;
  }

  // No parameters are copied inside the host: its ranks share the buffer.
  LinkTransfer transfer_of(const AllGather& call, Channel channel) const {
    const int64_t nbytes = encoded_nbytes(call.encoding, call.flat.numel(), call.dtype());
    if (channel == Channel::kParams) return {.channel = kGathers, .nbytes = over_link(nbytes)};
    return {.channel = kReductions, .host_seconds = in_host(nbytes), .nbytes = over_link(nbytes)};
  }
  LinkTransfer transfer_of(const ReduceScatter& call, Channel /*channel*/) const {
    int64_t nbytes = encoded_nbytes(call.options.encoding, call.bounds.back(), call.dtype());
    const at::Tensor& gathered = call.options.gather_into;
    if (gathered.defined()) nbytes += static_cast<int64_t>(gathered.nbytes());
    return {.channel = kReductions,
            .host_seconds = in_host(nbytes),
            .nbytes = over_link(nbytes),
            .rounds = gathered.defined() ? 2 : 1};
  }
  LinkTransfer transfer_of(const AllReduce& call, Channel /*channel*/) const {
    const bool at_once = is_reduced_whole(call.tensor);
    // Small ones are sent by each rank of a host; of large ones, each sends its part.
    const int64_t times = at_once ? options_.ranks_per_host : 1;
    const auto nbytes = static_cast<int64_t>(call.tensor.nbytes());
    return {.channel = kAgreement,
            .nbytes = static_cast<double>(times * all_reduce_bytes(nbytes, options_.hosts)),
            .rounds = at_once ? 1 : 2};
  }
  template <class Other>
  std::optional<LinkTransfer> transfer_of(const Other& /*call*/, Channel /*channel*/) const {
    return std::nullopt;
  }

  WorkPtr on_collective(const ProcessGroup& /*ranks*/, const Collective& collective,
                        int64_t /*sent*/) override {
    const Channel channel = collective.tag.channel;
    const std::optional<LinkTransfer> transfer = std::visit(
        [&](const auto& call) { return std::optional<LinkTransfer>(transfer_of(call, channel)); },
        collective.call);
    if (!transfer) return nullptr;
    const size_t number = clock_.start(*transfer);
    if (transfer->channel == kReductions) reductions_.push_back(number);
    return std::make_shared<Transfer>(clock_, number);
  }

  Clock::time_point now() const override {
    return Clock::time_point(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(clock_.now())));
  }
  void sleep_for(Clock::duration longest) override {
    while (!reductions_.empty() && clock_.is_over(reductions_.front())) reductions_.pop_front();
    if (!reductions_.empty())
      clock_.pause(reductions_.front(), std::chrono::duration<double>(longest).count());
  }

  void on_moment(size_t index) override {
    const bool begins_backward = index == moments_.size() || moments_[index].backward;
    if (begins_backward && !std::exchange(is_backward_, true)) forward_end_ = clock_.now();
  }
  // Computes the unit, in proportion to its elements.
  void on_used(size_t index) override {
    if (index == moments_.size()) return;
    const PaperMoment& moment = moments_[index];
    const double share = moment.backward ? options_.backward_share : 1 - options_.backward_share;
    const double all = elements_of_pass(moment);
    if (all > 0) clock_.compute(options_.compute_seconds * share * elements_of(moment) / all);
  }
  void on_step() override {
    backward_end_ = clock_.now();
    is_backward_ = false;
  }
  void on_update() override { clock_.compute(optimizer_seconds()); }

  const StepTimeOptions& options_;
  const bool is_one_host_;
  LinkClock clock_;
  std::deque<size_t> reductions_;
  double elements_[2] = {0, 0};
  double forward_end_ = 0, backward_end_ = 0;
  bool is_backward_ = false;
  PaperJob job_;
  const std::vector<PaperMoment> moments_;
};

}  // namespace

StepTime step_time(const std::vector<ParameterSize>& parameters, const ShardPlan& wanted,
                   const StepTimeOptions& options) {
  check_numbers(options);
  const ShardPlan plan = foreseeable_plan(parameters, wanted, options.ranks());
  TORCH_CHECK_NOT_IMPLEMENTED(plan.offload == Offload::kNone,
                              "[step_time] plan.offload must be kNone: the time of a step in host "
                              "memory or files is not known");
  TimeLine line(parameters, plan, options);
  for (int step = 1; step < kSteps; ++step) line.step();
  return line.step();
}

}  // namespace tessera
