#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/world.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// The place where ranks find each other, and the means that connect them.
struct Meeting {
  RankInfo info;  ///< this rank's place among the ranks that meet
  c10::intrusive_ptr<c10d::Store> store;
  std::string backend;
  Transport transport = Transport::kAuto;
  std::chrono::milliseconds timeout;
};

/// Connects the ranks that find each other through `meeting.store`. Collective: all ranks return,
/// or fail, together.
///
/// Throws `c10::DistNetworkError` in the name of `function`, saying that all ranks must call
/// `call`, if some do not arrive in time, and `c10::NotImplementedError` on all ranks if
/// `meeting.transport` is kArena and the arena is not available.
ProcessGroupPtr connect(const Meeting& meeting, const std::string& function,
                        const std::string& call);

}  // namespace tessera
