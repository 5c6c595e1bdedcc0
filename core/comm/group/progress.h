#pragma once

#include <tessera/comm/process_group.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string_view>

#include "comm/group/capability.h"

namespace tessera {

/// The part of training that a rank is in, as far as the library sees it.
enum class Phase : uint8_t { kUserCode, kForward, kBackward, kStep, kSave, kLoad };

/// Returns "forward", "user code", ...
constexpr std::string_view phase_name(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kStep:
      return "update";
    case Phase::kSave:
      return "save";
    case Phase::kLoad:
      return "load";
    case Phase::kUserCode:
      break;
  }
  return "user code";
}

/// How far a rank has come. The engine writes it, and ranks that wait for this one report it. Any
/// thread may call any member; each takes a few nanoseconds.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  struct State {
    Phase phase = Phase::kUserCode;
    int64_t step = 1;  ///< the step that the rank is in, from 1
    Clock::time_point since;
  };

  void enter(Phase phase) {
    if (phase_.exchange(phase, std::memory_order_relaxed) != phase) stamp();
  }
  /// An optimizer has finished its step number `steps`, from 1. With several optimizers, the one
  /// that has made most steps counts.
  void finish_step(int64_t steps) {
    int64_t known = steps_.load(std::memory_order_relaxed);
    while (known < steps &&
           !steps_.compare_exchange_weak(known, steps, std::memory_order_relaxed)) {
    }
    enter(Phase::kUserCode);
  }

  State state() const {
    return {phase_.load(std::memory_order_relaxed), steps_.load(std::memory_order_relaxed) + 1,
            Clock::time_point(Clock::duration(since_.load(std::memory_order_relaxed)))};
  }

 private:
  void stamp() { since_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed); }

  std::atomic<Phase> phase_ = Phase::kUserCode;
  std::atomic<int64_t> steps_ = 0;
  std::atomic<Clock::rep> since_ = Clock::now().time_since_epoch().count();
};

/// A process group of a rank whose progress the other ranks can ask for.
class HasProgress {
 public:
  virtual ~HasProgress() = default;

  /// Returns the same object for all process groups of one world on one rank; null if the ranks do
  /// not watch each other.
  virtual Progress* progress() = 0;
};

/// Returns null for a process group whose ranks do not watch each other (one rank, a fake world).
inline Progress* progress_of(ProcessGroup& process_group) {
  auto* const has = capability<HasProgress>(process_group);
  return has ? has->progress() : nullptr;
}

/// Enters `phase` while it lives, then the phase before. `progress` may be null.
class PhaseScope {
 public:
  PhaseScope(Progress* progress, Phase phase) : progress_(progress) {
    if (!progress_) return;
    before_ = progress_->state().phase;
    progress_->enter(phase);
  }
  ~PhaseScope() {
    if (progress_) progress_->enter(before_);
  }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Progress* const progress_;
  Phase before_ = Phase::kUserCode;
};

}  // namespace tessera
