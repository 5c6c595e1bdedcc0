#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/process_group.h>

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/arena/host_table.h"

namespace tessera {

/// Makes a process group of the ranks that `whole` connects. They find each other through `store`.
/// The ranks of a host share memory. All hosts must have the same number of ranks, at least 2.
/// `address`: where this rank listens to other hosts; empty: at that of the host's name. `key`: see
/// `shake_hands()`. Collective.
///
/// Throws `c10::NotImplementedError` on every rank, naming the rank and the reason, if the ranks of
/// any host can't share memory.
ProcessGroupPtr hosted_process_group(ProcessGroupPtr whole,
                                     const c10::intrusive_ptr<c10d::Store>& store,
                                     const HostTable& table, const std::string& address,
                                     const std::string& key);

}  // namespace tessera
