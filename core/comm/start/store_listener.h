#pragma once

#include <tessera/comm/world.h>

namespace tessera {

/// Opens the listening socket of the store that rank 0 serves at MASTER_PORT: at the address that
/// MASTER_ADDR is for this host alone; at all, if this host does not have that address, or if it is
/// a name that only this host takes for its loopback interface.
///
/// Throws `c10::DistNetworkError` if the port is taken. The caller owns the descriptor.
int open_store_listener(const RankInfo& info);

}  // namespace tessera
