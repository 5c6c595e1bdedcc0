#include "comm/group/interruption.h"

#include <tessera/comm/world.h>
#include <unistd.h>

#include <atomic>

namespace tessera {
namespace {

std::atomic<bool> interrupted = false;
std::atomic<void (*)()> raise = nullptr;

}  // namespace

void interrupt_waits() noexcept { interrupted = true; }
void on_interruption(void (*fn)()) { raise = fn; }

bool is_interrupted(pid_t thread) { return interrupted && thread == ::getpid(); }

void raise_interruption() {
  if (!interrupted || !is_interrupted(::gettid())) return;
  interrupted = false;
  if (auto* const fn = raise.load()) fn();
}

}  // namespace tessera
