#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace tessera {

/// Tracks the children forked by this process that still see its memory: those that have neither
/// ended nor started another program. Their own children count in the same way. Not thread-safe.
///
/// A child holds one end of a pipe. The kernel closes it when the child ends or starts a program.
class ForkedChildren {
 public:
  ForkedChildren() = default;
  ~ForkedChildren();
  ForkedChildren(const ForkedChildren&) = delete;
  ForkedChildren& operator=(const ForkedChildren&) = delete;

  /// Must be called around fork(): the first in the parent, then each of the others on its side.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

  /// Returns how often the process has forked.
  int64_t forks() const { return forks_; }
  /// Returns the number of the last fork, from 1, whose child sees this memory; 0 if there is none.
  /// May notice late that a child has ended.
  int64_t last_seeing();

 private:
  struct Child {
    int64_t fork;
    int pipe;  // its other end is closed when the child ends
  };
  using Clock = std::chrono::steady_clock;

  void forget_gone();

  int64_t forks_ = 0;
  int pipe_[2] = {-1, -1};  // of the fork under way
  std::vector<Child> children_;
  Clock::time_point looked_;
};

}  // namespace tessera
