#pragma once

#include <tessera/comm/process_group.h>
#include <tessera/comm/world.h>
#include <tessera/export.h>

namespace tessera {

/// Makes a world in which only one rank is real, this process as rank `rank` of `size`, and makes
/// it the default world of this thread.
///
/// A training program then does the work of that rank: the same code gathers, reduces and steps,
/// with shards of the same sizes, and collectives in the same order and with the same bytes. So the
/// memory and the work of one rank of 1,024 can be examined on one machine:
///
/// ```cpp
/// auto world = tessera::fake_world(1024, 17);       // in place of tessera::init()
/// auto sharded = tessera::fully_shard(model);       // keeps the shard of rank 17
/// ...                                               // backward, step
/// std::cout << optimizer.memory().optimizer_state;  // bytes of rank 17
/// ```
///
/// No data comes from other ranks; it is as if each of them held this rank's data (see
/// `fake_process_group()`). So values are meaningless, but checks that all ranks agree pass, and
/// finite values stay finite. Process groups of some ranks, meshes and `hybrid_process_groups()`
/// are fake, too, and nothing waits. Each rank counts as a host of its own. For a model that is
/// larger than this machine's memory, build it in a `DeferredInit` scope: then only the shard is
/// made.
///
/// Throws `c10::ValueError` unless `rank` is from 0 to `size - 1`.
[[nodiscard]] TESSERA_API World fake_world(int size, int rank = 0);

/// Makes the process group of such a world: this process is rank `rank` of `size`.
///
/// Collectives check their arguments like those of other process groups, are complete when they
/// return, and leave in their outputs:
/// - `all_gather`: this rank's shard at its place, and repeated over the places of the other ranks,
///   whose shards thus equal it if they have the same length. Zeros if it has no elements.
/// - `reduce_scatter`, `all_reduce`: the result if all ranks contribute the same values.
/// - `broadcast`: the values that `tensor` holds.
/// - `all_to_all`: in each message, the data that this rank sends to itself, repeated or cut; zeros
///   if it sends itself nothing.
///
/// For tensors in host memory. `sends_to()` returns all other ranks, so that a counting process
/// group counts the bytes of messages between hosts.
/// Throws `c10::ValueError` unless `rank` is from 0 to `size - 1`.
TESSERA_API ProcessGroupPtr fake_process_group(int rank, int size);

}  // namespace tessera
