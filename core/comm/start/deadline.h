#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace tessera {

/// The time at which a wait of several parts must have ended.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  std::chrono::milliseconds timeout() const { return timeout_; }
  std::chrono::duration<double> waited() const { return Clock::now() - start_; }
  bool has_passed() const { return Clock::now() >= start_ + timeout_; }
  /// At least 1 ms, because c10d takes 0 for no limit.
  std::chrono::milliseconds left() const {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(start_ + timeout_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(1));
  }

 private:
  Clock::time_point start_ = Clock::now();
  std::chrono::milliseconds timeout_;
};

/// Runs `fn` as `within()` does; returns false if the deadline passed.
bool run_within(const Deadline& deadline, std::function<void()> fn,
                const std::function<void()>& meanwhile);

/// Runs `fn` on a thread of its own that works for the calling rank, and returns its result; null
/// if `deadline` passes first. Calls `meanwhile` every 50 ms on the calling thread.
///
/// For calls of c10d and Gloo that have no time limit, or a much longer one. A thread whose
/// deadline passes, or whose caller ends because `meanwhile` throws, is left to itself: so `fn`
/// must own everything that it uses. Rethrows exceptions of `fn` that are thrown in time.
template <typename F>
std::optional<std::invoke_result_t<F>> within(const Deadline& deadline, F fn,
                                              const std::function<void()>& meanwhile) {
  const auto result = std::make_shared<std::optional<std::invoke_result_t<F>>>();
  const bool ended = run_within(
      deadline, [result, fn = std::move(fn)] { result->emplace(fn()); }, meanwhile);
  return ended ? std::move(*result) : std::nullopt;
}

}  // namespace tessera
