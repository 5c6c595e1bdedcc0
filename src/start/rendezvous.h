#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/world.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// Makes the store through which the ranks of a job find each other: a TCP store that rank 0 serves
/// (under torchrun, its agent does), with separate keys for each restart of the job.
///
/// Throws `c10::DistNetworkError`, naming the address, if it can't be reached within `timeout`.
c10::intrusive_ptr<c10d::Store> rendezvous_store(const RankInfo& info,
                                                 std::chrono::milliseconds timeout);

/// Returns the name of this host, with ids that differ on other hosts of the same name.
std::string host_identity();

/// Gives the host another name for this thread, as long as the object lives, so that ranks of one
/// process appear to be on several hosts.
class SimulatedHost {
 public:
  explicit SimulatedHost(std::string name);
  ~SimulatedHost();
  SimulatedHost(const SimulatedHost&) = delete;
  SimulatedHost& operator=(const SimulatedHost&) = delete;
};

/// Compares the hosts of all ranks through `store`, and sets `local_rank` and `local_size` of
/// `info`. Collective.
///
/// Throws `c10::DistNetworkError` if a rank does not arrive within `timeout`.
void compare_hosts(c10d::Store& store, RankInfo& info, std::chrono::milliseconds timeout);

/// Returns a part of `store` that is empty for all ranks, however often they joined through it
/// before. Collective.
c10::intrusive_ptr<c10d::Store> fresh_store(const c10::intrusive_ptr<c10d::Store>& store, int size);

}  // namespace tessera
