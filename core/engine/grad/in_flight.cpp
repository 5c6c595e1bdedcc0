#include "engine/grad/in_flight.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/group/capability.h"
#include "engine/grad/longest_pause.h"

namespace tessera {
namespace {

// As kLongestPause, on a device. Its stream does not wait in the host's place, as that would be a
// condition; the pause is longer there, because kernels of a unit may take long. If one expires
// without progress, the ranks use different units, and pauses are short for some backwards.
constexpr auto kLongestDevicePause = std::chrono::milliseconds(500);
constexpr auto kShortDevicePause = std::chrono::milliseconds(1);
constexpr int kShortBackwards = 64;
constexpr auto kPollInterval = std::chrono::microseconds(100);

}  // namespace

void InFlight::allow_buckets(int64_t nbytes) { limit_ = std::max(limit_, 2 * nbytes); }

void InFlight::begin_backward() {
  if (short_backwards_ > 0) --short_backwards_;
}

void InFlight::add(size_t unit) {
  units_.push_back(unit);
  bytes_ += gradients_[unit]->unit().layout().nbytes();
}

void InFlight::keep_limit(bool may_wait) {
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  auto pause = kLongestPause;
  if (on_device_) pause = short_backwards_ > 0 ? kShortDevicePause : kLongestDevicePause;
  if (!may_wait) pause = {};
  if (units_.empty()) return;
  auto* const clock = capability<HasClock>(gradients_.front()->unit().context().mesh.shard());
  const auto now = [&] { return clock ? clock->now() : std::chrono::steady_clock::now(); };
  const auto deadline = now() + pause;
  while (!units_.empty()) {
    const size_t oldest = units_.front();
    const bool is_over = bytes_ > limit_;
    if (gradients_[oldest]->is_reduced()) {
      if (on_device_) gradients_[oldest]->wait_on_stream();  // which frees what it has sent
      bytes_ -= gradients_[oldest]->unit().layout().nbytes();
      units_.erase(units_.begin());
    } else if (is_over && now() < deadline) {
      clock ? clock->sleep_for(kPollInterval) : std::this_thread::sleep_for(kPollInterval);
    } else {
      if (is_over && short_backwards_ == 0) short_backwards_ = kShortBackwards;
      return;
    }
  }
}

void InFlight::clear() {
  units_.clear();
  bytes_ = 0;
}

}  // namespace tessera
