#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/world.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// Makes the store through which the ranks of a job find each other: a TCP store that rank 0 serves
/// (under torchrun its agent does), with keys of their own for each restart of the job.
///
/// Throws `c10::DistNetworkError` naming the address if it is not reached within `timeout`.
c10::intrusive_ptr<c10d::Store> rendezvous_store(const RankInfo& info,
                                                 std::chrono::milliseconds timeout);

/// Names this host and what separates it from others that may share its name.
std::string host_identity();

/// Gives the host another name for this thread, as long as the object lives: ranks of one process
/// then are on several hosts.
class SimulatedHost {
 public:
  explicit SimulatedHost(std::string name);
  ~SimulatedHost();
  SimulatedHost(const SimulatedHost&) = delete;
  SimulatedHost& operator=(const SimulatedHost&) = delete;
};

/// How many ranks run on this host, and how many of them come before this one.
struct LocalRank {
  int local_rank = 0;
  int local_size = 1;
};

/// Compares the hosts of all ranks through `store`. Collective.
///
/// Throws `c10::DistNetworkError` if a rank does not come within `timeout`.
LocalRank compare_hosts(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

/// A part of `store` that is empty for all ranks, however often they joined through it before.
/// Collective.
c10::intrusive_ptr<c10d::Store> fresh_store(const c10::intrusive_ptr<c10d::Store>& store, int size);

}  // namespace tessera
