#pragma once

#include <tessera/comm/world.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/start/deadline.h"
#include "comm/start/rank_processes.h"

namespace tessera {

/// The facts that a rank tells the others when it arrives.
struct Arrival {
  int rank = 0;
  int name = 0;  ///< the rank's number in messages: in a part of a world, that in the world
  int size = 1;
  int local_size = 1;     ///< by the launcher; 1: unknown
  std::string host;       ///< `host_identity()`
  std::string host_name;  ///< for messages
  int64_t pid = 0;
  std::string processes;   ///< the processes among which `pid` is unique: a namespace of the host
  std::string transport;   ///< "auto", "gloo" or "arena"
  std::string backend;     ///< "gloo", or a registered one
  int64_t timeout = 0;     ///< of all waits; ms
  std::string endpoint;    ///< an address of the rank for other services; may be empty
  RankProcesses launched;  ///< by the launcher of the rank

  /// Returns "rank 1 (process 123 on host a)".
  std::string describe() const;
};

std::string to_text(const Arrival& arrival);
/// Throws `c10::ValueError` for a text that is not one of `to_text()`.
Arrival arrival_from_text(const std::string& text);

/// The arrivals that a rank knows of. One thread notes them while another one reports.
class Attendance {
 public:
  /// `names`: of all ranks, if they are not 0, 1, ...
  Attendance(Arrival own, std::vector<int> names);

  const Arrival& own() const { return own_; }
  /// Returns "rank 0 of 4 (host a)".
  std::string own_name() const;

  void note(const Arrival& arrival);
  /// In rank order. Complete once all have arrived.
  std::vector<Arrival> arrivals() const;

  std::vector<int> missing() const;
  /// Returns "ranks 2, 3".
  std::string describe(const std::vector<int>& ranks) const;
  /// Returns "ranks 0, 1 are there (hosts a, a)", and "all ranks are there (...)".
  std::string describe_present() const;
  /// Whether no rank before this one is there: one rank reports for all.
  bool is_first() const;

  /// Returns a sentence on each process of this host that has ended ("rank 1 (process 123 on host
  /// a) has ended") or is stopped. Empty if there is none.
  std::string describe_halted() const;
  /// Returns such a sentence on a rank that ended more than a second ago, by the time of these
  /// calls.
  std::string long_ended();

 private:
  char state_of(const Arrival& arrival) const;

  const Arrival own_;
  const std::vector<int> names_;
  mutable std::mutex mutex_;
  std::map<int, Arrival> present_;  // by rank
  std::map<int, Deadline::Clock::time_point> ended_;
};

/// Puts the own arrival of `attendance` into `store`, whose keys must be new for this meeting, and
/// waits until all ranks are there. Collective.
///
/// Returns an empty text, or an error that is the same on all ranks that are there: the ranks come
/// from different jobs, by their numbers, world sizes or backends. Throws the store's errors, and
/// `c10::DistNetworkError` if `deadline` passes.
std::string arrive(Attendance& attendance, c10d::Store& store, const Deadline& deadline);

/// Waits up to a minute, within `deadline`, for the ranks that the launcher has started. Then keeps
/// rank 0, the store's server, until the others have read that they are refused, or for a second.
/// All ranks must call it.
void leave_refused(const Attendance& attendance, c10d::Store& store, const Deadline& deadline);

/// The settings that hold for all ranks.
struct Agreement {
  Transport transport = Transport::kAuto;
  std::chrono::milliseconds timeout{};
  bool one_host = false;
  std::string refusal;  ///< why there is no agreement; the same on all ranks
  std::vector<std::string> warnings;
};

/// Returns the same on all ranks. `arrivals`: in rank order.
Agreement agree(const std::vector<Arrival>& arrivals);

std::string transport_name(Transport transport);

}  // namespace tessera
