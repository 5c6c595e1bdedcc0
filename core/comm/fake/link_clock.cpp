#include "comm/fake/link_clock.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace tessera {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// What is left of an event is rounded: less than this of it counts as nothing.
constexpr double kRounding = 1e-12;

// The share of its processor that a rank gives to messages while it computes: two threads of equal
// priority share a core equally.
constexpr double kMostForMessages = 0.5;

}  // namespace

size_t LinkClock::start(const LinkTransfer& transfer) {
  TORCH_INTERNAL_ASSERT(transfer.channel < kChannels);
  transfers_.push_back({.transfer = transfer, .left = transfer.host_seconds});
  queues_[transfer.channel].push_back(transfers_.size() - 1);
  sent_ += transfer.nbytes;
  settle();
  return transfers_.size() - 1;
}

// Moves a transfer on by all stages that need no time. Returns false if it is in one that does.
bool LinkClock::proceed(State& state) {
  if (state.left > 0) return false;
  switch (state.stage) {
    case Stage::kHost: {
      const bool is_instant = rates_.bandwidth == 0 && rates_.processor_seconds_per_byte == 0;
      state.stage = Stage::kLink;
      state.left = is_instant ? 0 : state.transfer.nbytes;
      return true;
    }
    case Stage::kLink:
      state.stage = Stage::kFlight;
      state.left = state.transfer.nbytes > 0 ? state.transfer.rounds * rates_.latency : 0;
      return true;
    case Stage::kFlight:
      state.is_over = true;
      return false;
  }
  return false;
}

void LinkClock::settle() {
  for (auto& queue : queues_) {
    while (!queue.empty()) {
      State& first = transfers_[queue.front()];
      while (proceed(first)) continue;
      const bool leaves = first.stage == Stage::kFlight && !first.is_over;
      if (!first.is_over && !leaves) break;
      if (leaves) in_flight_.push_back(queue.front());
      queue.pop_front();
    }
  }
  std::erase_if(in_flight_, [this](size_t transfer) {
    proceed(transfers_[transfer]);
    return transfers_[transfer].is_over;
  });
}

std::vector<size_t> LinkClock::active() const {
  std::vector<size_t> active = in_flight_;
  for (const auto& queue : queues_) {
    if (!queue.empty()) active.push_back(queue.front());
  }
  return active;
}

LinkClock::Speed LinkClock::speed(bool computes) const {
  int sharers = 0;
  for (const size_t transfer : active())
    sharers += transfers_[transfer].stage == Stage::kLink ? 1 : 0;
  if (sharers == 0) return {};
  const double cost = rates_.processor_seconds_per_byte;
  const double most = computes ? kMostForMessages : 1;
  double bandwidth = rates_.bandwidth > 0 ? rates_.bandwidth : kNever;
  if (cost > 0) bandwidth = std::min(bandwidth, most / cost);
  return {.channel = bandwidth / sharers, .rank = 1 - (cost > 0 ? bandwidth * cost : 0)};
}

double LinkClock::seconds_left(const State& state, const Speed& speed) const {
  return state.stage == Stage::kLink ? state.left / speed.channel : state.left;
}

double LinkClock::next_event(const Speed& speed) const {
  double next = kNever;
  for (const size_t transfer : active())
    next = std::min(next, seconds_left(transfers_[transfer], speed));
  return next;
}

void LinkClock::advance(double seconds, const Speed& speed) {
  for (const size_t transfer : active()) {
    State& state = transfers_[transfer];
    const double left = seconds_left(state, speed);
    const bool ends = left <= seconds * (1 + kRounding);
    state.left = ends ? 0 : state.left * (1 - seconds / left);
  }
  now_ += seconds;
  settle();
}

void LinkClock::compute(double seconds) {
  while (seconds > 0) {
    const Speed now = speed(/*computes=*/true);
    const double rest = seconds / now.rank;
    const double next = next_event(now);
    if (rest <= next * (1 + kRounding)) {
      advance(rest, now);
      return;
    }
    seconds -= next * now.rank;
    advance(next, now);
  }
}

void LinkClock::wait(size_t transfer) { pause(transfer, kNever); }

void LinkClock::pause(size_t transfer, double longest) {
  while (!is_over(transfer) && longest > 0) {
    const Speed now = speed(/*computes=*/false);
    const double next = std::min(longest, next_event(now));
    advance(next, now);
    longest -= next;
  }
}

}  // namespace tessera
