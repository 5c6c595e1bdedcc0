#include "comm/backend_work.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace tessera {

BackendProcessGroupWork::BackendProcessGroupWork(CollectiveName name,
                                                 std::chrono::milliseconds timeout,
                                                 std::vector<BackendWork> works,
                                                 std::function<void()> finish)
    : name_(std::move(name)),
      timeout_(timeout),
      works_(std::move(works)),
      finish_(std::move(finish)) {}

void BackendProcessGroupWork::wait() {
  check_process(mark_, name_);
  std::lock_guard lock(mutex_);
  const auto start = std::chrono::steady_clock::now();
  for (const BackendWork& work : works_) {
    wait_for(work, start);
  }
  if (finish_) {
    std::exchange(finish_, nullptr)();
  }
}

bool BackendProcessGroupWork::is_completed() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock.owns_lock() && std::all_of(works_.begin(), works_.end(),
                                         [](const auto& work) { return work->isCompleted(); });
}

void BackendProcessGroupWork::wait_for(const BackendWork& work,
                                       std::chrono::steady_clock::time_point start) {
  const auto elapsed = [&] { return std::chrono::steady_clock::now() - start; };
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(timeout_ - elapsed());
  std::exception_ptr error;
  bool completed = false;
  try {
    // Zero would mean no timeout at all.
    completed = work->wait(std::max(left, std::chrono::milliseconds(1)));
  } catch (...) {
    error = std::current_exception();
  }
  if (error || !completed) {
    throw_wait_failed(name_, "its peers", elapsed(), timeout_, error);
  }
}

}  // namespace tessera
