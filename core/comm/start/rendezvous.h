#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/world.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/start/deadline.h"

namespace tessera {

/// Makes the store through which the ranks of a job find each other: a TCP store that rank 0 serves
/// (under torchrun, its agent does), with separate keys for each restart of the job. See
/// `open_store_listener()` for where it listens, and `with_secret()` for what its values carry.
/// Children do not have its sockets.
///
/// Throws `c10::DistNetworkError`, naming the address, if it can't be reached within `deadline`, or
/// if it belongs to a job with another `job_token()`; that job notices nothing.
c10::intrusive_ptr<c10d::Store> rendezvous_store(const RankInfo& info, const Deadline& deadline);

/// Makes the store that this rank serves ignore new connections. Those of the ranks continue.
void refuse_new_clients(const RankInfo& info);

/// Returns a part of `store` that is empty for all ranks, however often they joined through it
/// before. Collective.
c10::intrusive_ptr<c10d::Store> fresh_store(const c10::intrusive_ptr<c10d::Store>& store, int size);

}  // namespace tessera
