#pragma once

namespace tessera {

/// Gives the calling thread, and what it starts, an empty /dev/shm and mounts of their own, where
/// files of other programs don't appear. Must be called before other threads are started. False
/// where this process may not mount anything.
bool take_own_shared_memory();

}  // namespace tessera
