#include "interop/command/interruption.h"

#include <exception>
#include <utility>

namespace tessera::tools {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

volatile std::sig_atomic_t taken = 0;

void take(int signal) { taken = signal; }

class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted"; }
};

}  // namespace

Interruption::Interruption() {
  taken = 0;
  for (const int signal : kSignals) {
    struct sigaction before {
    }, action{};
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) continue;
    previous_[signal] = before;
    action.sa_handler = take;
    action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
    ::sigaction(signal, &action, nullptr);
  }
}

Interruption::~Interruption() {
  for (const auto& [signal, action] : previous_) ::sigaction(signal, &action, nullptr);
}

void Interruption::check() const {
  if (taken != 0) throw Interrupted();
}

CheckpointProgress Interruption::checked(CheckpointProgress progress) const {
  return [this, progress = std::move(progress)](int64_t done, int64_t total) {
    check();
    if (progress) progress(done, total);
  };
}

void Interruption::pass_on() const {
  if (taken == 0) return;
  std::signal(taken, SIG_DFL);
  std::raise(taken);
}

int run_interruptible(const std::function<int(const Interruption&)>& work) {
  const Interruption interruption;
  int status = 0;
  try {
    status = work(interruption);
  } catch (const Interrupted&) {
    interruption.pass_on();
  }
  return status;
}

}  // namespace tessera::tools
