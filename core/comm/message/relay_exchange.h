#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/group/local_sum.h"
#include "comm/message/exchange.h"

namespace tessera {

/// A gather of small data, and a sum of it.
struct RelayTask {
  at::Tensor flat;              ///< bytes of all ranks; holds this rank's already
  std::vector<int64_t> bounds;  ///< of the ranks' bytes in `flat`
  int tag = 0;
  /// Receives the reduction of the ranks' data, then of equal sizes; undefined: none.
  at::Tensor out;
  LocalReduction reduction;
};

/// Starts a gather in which ranks pass on the data that they have received: with N ranks, each
/// sends to ceil(log2 N) others, at most two messages to each where data is small, and as many
/// bytes in all as if each sent its own data to all others (Bruck's algorithm, "Efficient
/// algorithms for all-to-all communications in multiport message-passing systems", 1997).
///
/// Posts all receives and the first sends; `run()` of the result does the rest. The outputs are
/// done when nobody reads `flat` any more.
std::shared_ptr<Exchange> start_relay(CollectiveName name, std::chrono::milliseconds timeout,
                                      const Mailbox& mailbox, RelayTask task);

}  // namespace tessera
