#pragma once

#include <tessera/comm/process_group.h>

#include <chrono>
#include <cstdint>

namespace tessera {

/// The ranks of a job that is only planned. Each is taken to do what this one does.
struct PaperRanks {
  int size = 1;
  int rank = 0;
  bool shares_memory = false;  ///< with the other ranks of its host
  bool sends = true;           ///< has ranks on other hosts, or does not share memory
};

/// Hears of the collectives of such a job, and tells how long they take.
class CollectiveObserver {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~CollectiveObserver() = default;

  /// `sent`: the bytes that this rank sends. Returns null if the collective is over at once.
  virtual WorkPtr on_collective(const ProcessGroup& ranks, const Collective& collective,
                                int64_t sent) = 0;
  virtual Clock::time_point now() const { return {}; }
  /// Lets time pass until the oldest reduction is over, but at most so long.
  virtual void sleep_for(Clock::duration /*longest*/) {}
};

/// Returns a process group of ranks of which only this one runs, for meta tensors, with which its
/// collectives do nothing. Other tensors get the values that a fake world gives them.
ProcessGroupPtr paper_process_group(const PaperRanks& ranks, CollectiveObserver& observer);

}  // namespace tessera
