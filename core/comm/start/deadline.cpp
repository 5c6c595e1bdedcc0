#include "comm/start/deadline.h"

#include <ATen/ThreadLocalState.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "comm/group/interruption.h"

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kBetweenCalls{50};

// A function that another thread runs. Both threads own it.
class TimedCall {
 public:
  explicit TimedCall(std::function<void()> fn) : fn_(std::move(fn)) {}

  void run() {
    std::exception_ptr failure;
    try {
      // The rank of the calling thread, if ranks are threads, and the dispatch keys that go with
      // it.
      const at::ThreadLocalStateGuard rank(state_);
      fn_();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    ended_ = true;
    changed_.notify_all();
  }

  bool wait_until(const Deadline& deadline, const std::function<void()>& meanwhile) {
    std::unique_lock lock(mutex_);
    while (!ended_ && !deadline.has_passed()) {
      if (changed_.wait_for(lock, std::min(deadline.left(), kBetweenCalls), [&] { return ended_; }))
        break;
      lock.unlock();
      TORCH_CHECK_WITH(DistBackendError, !is_interrupted(::gettid()), "it was interrupted");
      meanwhile();
      lock.lock();
    }
    return ended_;
  }

  // Only after the call has ended.
  void rethrow_failure() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  const std::function<void()> fn_;
  const at::ThreadLocalState state_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::exception_ptr failure_;
};

}  // namespace

bool run_within(const Deadline& deadline, std::function<void()> fn,
                const std::function<void()>& meanwhile) {
  const auto call = std::make_shared<TimedCall>(std::move(fn));
  std::thread thread([call] { call->run(); });
  bool ended = false;
  try {
    ended = call->wait_until(deadline, meanwhile);
  } catch (...) {
    thread.detach();
    throw;
  }
  if (!ended) {
    thread.detach();
    return false;
  }
  thread.join();
  call->rethrow_failure();
  return true;
}

}  // namespace tessera
