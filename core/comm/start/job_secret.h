#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/world.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/start/deadline.h"

namespace tessera {

/// Returns `store` with the codes of the job's secret, or as it is if the job has none: that is
/// TESSERA_SECRET, which must be the same on all ranks (`tessera run` sets it), else, if all ranks
/// are on this host, one that rank 0 makes and that only processes of the same user can read.
/// Collective over the ranks that meet at `store`.
///
/// Throws `c10::DistNetworkError` on a rank that has TESSERA_SECRET while rank 0 has none, or the
/// other way round, or that can't read rank 0's.
c10::intrusive_ptr<c10d::Store> with_secret(c10::intrusive_ptr<c10d::Store> store,
                                            const RankInfo& info, const Deadline& deadline);

}  // namespace tessera
