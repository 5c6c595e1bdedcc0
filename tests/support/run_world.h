#pragma once

#include <tessera/world.h>

#include <chrono>
#include <functional>

namespace tessera {

/// Runs `fn` on `size` ranks, which are threads of this process that share an in-memory store.
///
/// In `fn` the rank's world is the default one. Every wait has `timeout`. When ranks fail, the
/// first failure in time is rethrown with its rank in the message: a `c10::Error` keeps its type,
/// any other exception becomes a `std::runtime_error`. A rank that never returns ends the whole
/// test program with a message that names it, since a thread can't be killed.
void run_world(int size, const std::function<void(World&)>& fn,
               std::chrono::milliseconds timeout = std::chrono::seconds(30));

}  // namespace tessera
