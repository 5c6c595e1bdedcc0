#pragma once

#include <c10/util/Exception.h>
#include <sys/types.h>

#include <functional>

namespace tessera {

/// True if `thread` is the process's first, `interrupt_waits()` was called, and the thread has not
/// called `raise_interruption()` since.
bool is_interrupted(pid_t thread);

/// Calls the function of `on_interruption()` if this thread is interrupted.
void raise_interruption();

/// Returns the result of `wait(arguments...)`, which waits for other ranks. If an interruption ends
/// it, what that throws replaces the error.
template <class F, class... Arguments>
auto interruptible(const F& wait, const Arguments&... arguments) {
  raise_interruption();
  try {
    return std::invoke(wait, arguments...);
  } catch (const c10::DistError&) {
    raise_interruption();
    throw;
  }
}

}  // namespace tessera
