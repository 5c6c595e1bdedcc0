#pragma once

#include <tessera/checkpoint/checkpoint_files.h>

#include <csignal>
#include <functional>
#include <map>

namespace tessera::tools {

/// While an object lives, SIGINT, SIGTERM and SIGHUP do not end the program at once, but the work
/// at its next call of `check()`: its unfinished files are removed on the way out. The same signal
/// again ends the program at once. Signals that were ignored (by nohup, say) stay ignored.
class Interruption {
 public:
  Interruption();
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  /// Throws if there was a signal.
  void check() const;
  /// Returns `progress` (it may be empty), preceded by a check.
  CheckpointProgress checked(CheckpointProgress progress) const;

  /// Ends the program as the signal would have done; returns if there was none.
  void pass_on() const;

 private:
  std::map<int, struct sigaction> previous_;
};

/// Runs work that can be interrupted; if it was, ends the program as the signal would have done.
int run_interruptible(const std::function<int(const Interruption&)>& work);

}  // namespace tessera::tools
