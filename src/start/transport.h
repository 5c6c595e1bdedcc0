#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/world.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// Returns the transport that `options` and the environment select. Throws `c10::ValueError` for an
/// unknown name.
Transport transport_of(const WorldOptions& options);

/// Puts the arena over `process_group`, whose ranks find each other through `store`, if `transport`
/// allows it and it is available. `one_host`: the ranks are known to be on one host. Collective.
///
/// Throws `c10::NotImplementedError` on all ranks if `transport` is kArena and it is not available.
ProcessGroupPtr with_arena(ProcessGroupPtr process_group,
                           const c10::intrusive_ptr<c10d::Store>& store, bool one_host,
                           Transport transport);

}  // namespace tessera
