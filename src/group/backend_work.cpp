#include "group/backend_work.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace tessera {

// Computes the maxima of the fingerprints and of their negatives. The two maxima are negatives of
// each other exactly if all fingerprints are equal.
FormComparison::FormComparison(c10d::Backend& backend, const CollectiveForm& form)
    : form_(form), told_(at::empty({2}, at::TensorOptions().dtype(at::kLong))) {
  const auto fingerprint = static_cast<int64_t>(form.fingerprint() >> 1);
  auto* const data = static_cast<int64_t*>(told_.mutable_data_ptr());
  data[0] = fingerprint;
  data[1] = -fingerprint;
  std::vector<at::Tensor> tensors{told_};
  work_ = backend.allreduce(tensors, {.reduceOp = c10d::ReduceOp::MAX});
}

void FormComparison::check(const CollectiveName& name) const {
  const auto* const data = static_cast<const int64_t*>(told_.const_data_ptr());
  TORCH_CHECK_WITH(
      DistBackendError, data[0] == -data[1], name.describe(),
      ": ranks came with different collectives to this place, this one with ", form_.text(),
      ". Expected all ranks to issue the same ones in the same order, with equal sizes "
      "and dtypes");
}

BackendProcessGroupWork::BackendProcessGroupWork(CollectiveName name,
                                                 std::chrono::milliseconds timeout,
                                                 std::optional<FormComparison> comparison,
                                                 std::vector<BackendWork> works,
                                                 std::function<void()> finish)
    : name_(std::move(name)),
      timeout_(timeout),
      comparison_(std::move(comparison)),
      works_(std::move(works)),
      finish_(std::move(finish)) {}

void BackendProcessGroupWork::wait() {
  check_process(mark_, name_);
  std::lock_guard lock(mutex_);
  const auto start = std::chrono::steady_clock::now();
  if (comparison_) {
    wait_for(comparison_->work(), start);
    comparison_->check(name_);
  }
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
    // A timeout of zero would mean no timeout at all.
    completed = work->wait(std::max(left, std::chrono::milliseconds(1)));
  } catch (...) {
    error = std::current_exception();
  }
  if (error || !completed) {
    throw_wait_failed(name_, "its peers", elapsed(), timeout_, error);
  }
}

}  // namespace tessera
