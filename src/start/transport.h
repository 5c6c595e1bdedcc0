#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/world.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// What `options` and the environment ask for. Throws `c10::ValueError` for an unknown name.
Transport transport_of(const WorldOptions& options);

/// Puts the arena over `process_group`, whose ranks find each other through `store`, where
/// `transport` wants it and it can be had. `one_host`: they are known to be on one host.
/// Collective.
///
/// Throws `c10::NotImplementedError` on all ranks where kArena can't be had.
ProcessGroupPtr with_arena(ProcessGroupPtr process_group,
                           const c10::intrusive_ptr<c10d::Store>& store, bool one_host,
                           Transport transport);

}  // namespace tessera
