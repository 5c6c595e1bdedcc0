#pragma once

#include <tessera/export.h>
#include <tessera/process_group.h>
#include <tessera/world.h>

namespace tessera {

/// Makes this process rank `rank` of `size` that are not there, and their world the default one of
/// this thread.
///
/// A training program then does what that rank would do: the same code gathers, reduces and steps,
/// with shards of the same sizes and collectives of the same order and bytes. So the memory and the
/// work of a rank of 1,024 can be looked at on one machine:
///
/// ```cpp
/// auto world = tessera::fake_world(1024, 17);       // in place of tessera::init()
/// auto sharded = tessera::fully_shard(model);       // keeps the shard of rank 17
/// ...                                               // backward, step
/// std::cout << optimizer.memory().optimizer_state;  // bytes of rank 17
/// ```
///
/// No data comes from other ranks; it is as if each of them held what this one holds (see
/// `fake_process_group()`). So values mean nothing, but checks that all ranks agree pass, and
/// nothing becomes infinite that was not. Process groups of some ranks, meshes and
/// `hybrid_process_groups()` are fake, too, and nothing waits. Each rank is on a host of its own.
/// Of a model that is larger than this machine's memory, `DeferredInit` makes the shard only.
///
/// Throws `c10::ValueError` unless `rank` is from 0 to `size - 1`.
[[nodiscard]] TESSERA_API World fake_world(int size, int rank = 0);

/// The process group of such a world: this process is rank `rank` of `size`.
///
/// Collectives check their arguments as those of other process groups do, are over when they
/// return, and leave in their outputs:
/// - `all_gather`: this rank's shard in its place, and repeated over the places of the others,
/// whose
///   shards are thus equal to it if they are equally long. Zeros if it has no elements.
/// - `reduce_scatter`, `all_reduce`: what comes out if all ranks give the same.
/// - `broadcast`: what `tensor` holds.
/// - `all_to_all`: in each message what this rank sends to itself, repeated or cut; zeros if that
/// is
///   nothing.
///
/// For tensors in host memory. It says that it sends to all other ranks (`sends_to()`), so that a
/// counting process group counts what messages between hosts would carry.
/// Throws `c10::ValueError` unless `rank` is from 0 to `size - 1`.
TESSERA_API ProcessGroupPtr fake_process_group(int rank, int size);

}  // namespace tessera
