#pragma once

#include <tessera/checkpoint_files.h>

#include <csignal>
#include <functional>
#include <map>

namespace tessera::tools {

/// While it lives, SIGINT, SIGTERM and SIGHUP do not end the program at once, but the work that
/// asks `check()` now and then: what it has begun to write is removed on the way out. The same
/// signal again ends the program at once. What was ignored (by nohup, say) stays ignored.
class Interruption {
 public:
  Interruption();
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  /// Throws if there was a signal.
  void check() const;
  /// `progress`, which may be empty, after a check.
  CheckpointProgress checked(CheckpointProgress progress) const;

  /// Ends the program as the signal would have done; returns if there was none.
  void pass_on() const;

 private:
  std::map<int, struct sigaction> previous_;
};

/// Runs work that can be interrupted, and then ends the program if it was.
int run_interruptible(const std::function<int(const Interruption&)>& work);

}  // namespace tessera::tools
