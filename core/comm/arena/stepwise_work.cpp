#include "comm/arena/stepwise_work.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "comm/group/interruption.h"
#include "comm/message/exchange.h"

namespace tessera {
namespace {

// How much longer a caller waits than the thread that runs the steps, whose error is more detailed.
constexpr std::chrono::milliseconds kGrace{500};

class StepwiseWork final : public Work {
 public:
  // The steps of one of the threads.
  enum class Part : uint8_t { kBegin, kEnd };

  StepwiseWork(CollectiveName name, std::chrono::milliseconds timeout, std::shared_ptr<Arena> arena,
               std::vector<CollectiveStep> steps, size_t sends)
      : name_(std::move(name)),
        timeout_(timeout),
        arena_(std::move(arena)),
        steps_(std::move(steps)),
        sends_(sends) {}

  // Runs the steps of a part. Returns true if the other part is left to run.
  bool run(Part part) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_ || state_ == State::kLastStep) return false;
      state_ = State::kRunning;
    }
    std::exception_ptr error;
    bool is_last = true;
    try {
      is_last = perform_steps(part);
    } catch (...) {
      error = std::current_exception();
    }
    if (error || is_last) {
      finish(error);
      return false;
    }
    std::unique_lock lock(mutex_);
    state_ = State::kSent;
    if (!aborted_) return true;
    drop();
    lock.unlock();
    changed_.notify_all();
    return false;
  }

  // Without a cause: the process group was closed.
  void abort(std::optional<WaitCause> cause) noexcept {
    {
      const std::lock_guard lock(mutex_);
      aborted_ = true;
      if (!cause_) cause_ = std::move(cause);
      if (auto* const exchange = dynamic_cast<ExchangeWork*>(waiting_for_.get())) exchange->abort();
      if (state_ == State::kQueued || state_ == State::kSent) drop();
    }
    changed_.notify_all();
    arena_->give_up();
  }

  void wait() override { wait_for_all(&Work::wait, {}); }
  void wait_inputs() override { wait_for_all(&Work::wait_inputs, earlier_); }

  bool is_completed() override {
    if (mark_.is_inherited()) return false;
    {
      const std::lock_guard lock(mutex_);
      if (state_ != State::kLastStep) return false;
      if (error_) return true;
    }
    return std::all_of(last_.begin(), last_.end(),
                       [](const WorkPtr& work) { return work->is_completed(); });
  }

 private:
  enum class State : uint8_t {
    kQueued,
    kRunning,
    kSent,  // the steps after the messages are queued
    kLastStep,
  };

  // Called with the lock: no thread will run the steps that are left.
  void drop() {
    const char* const what = state_ == State::kQueued ? " was not begun" : " was not ended";
    error_ = std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              name_.describe() + what + ": the process group was closed"));
    is_dropped_ = true;
    state_ = State::kLastStep;
  }

  void finish(const std::exception_ptr& error) noexcept {
    steps_.clear();  // also releases their captures
    {
      const std::lock_guard lock(mutex_);
      waiting_for_.reset();
      error_ = error;
      state_ = State::kLastStep;
    }
    changed_.notify_all();
  }

  // Returns true if the last step has been started.
  bool perform_steps(Part part) {
    const CollectiveTag tag{name_.subject, name_.channel};
    const size_t end = part == Part::kBegin ? sends_ + 1 : steps_.size();
    name_errors([&] {
      for (size_t i = part == Part::kBegin ? 0 : sends_ + 1; i < end; ++i) {
        wait_for_step();
        last_ = steps_[i](tag);
      }
    });
    return end == steps_.size();
  }

  // Waits for the step that was started last.
  void wait_for_step() {
    for (const WorkPtr& work : std::exchange(last_, {})) {
      {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK_WITH(DistBackendError, !aborted_, "the process group was closed");
        waiting_for_ = work;
      }
      work->wait();
      earlier_.push_back(work);
    }
  }

  // Waits for the works of the last step, then for `others`.
  void wait_for_all(void (Work::*wait)(), const std::vector<WorkPtr>& others) {
    interruptible([&] {
      const auto watched = begin_wait();
      const auto works = works_of_last_step();
      name_errors([&] {
        for (const WorkPtr& work : works) (work.get()->*wait)();
        for (const WorkPtr& work : others) (work.get()->*wait)();
      });
    });
  }

  std::shared_ptr<void> begin_wait() {
    if (!name_.watch || mark_.is_inherited()) return nullptr;
    return name_.watch->begin_wait(name_, [this](const WaitCause& cause) { abort(cause); });
  }

  std::optional<WaitCause> cause_of_abort() const {
    const std::lock_guard lock(mutex_);
    return cause_;
  }

  // Adds the collective's name to errors of its steps, in which ranks are numbered by host or rail.
  void name_errors(const std::function<void()>& step) const {
    try {
      step();
    } catch (const c10::DistBackendError& failure) {
      if (const auto cause = cause_of_abort()) throw_wait_aborted(name_, *cause);
      const auto* const wait = dynamic_cast<const WaitError*>(&failure);
      const bool timed_out = !wait || wait->timed_out();
      WaitCause cause = wait ? wait->cause() : WaitCause();
      // The step knows only the ranks of its host or rail, and those may wait for another rank.
      if (name_.watch && cause.evidence < Evidence::kReported) {
        WaitCause own = name_.watch->cause_of(name_, -1, timed_out, /*has_ended=*/false);
        if (own.evidence >= cause.evidence) cause = std::move(own);
      }
      const std::string error =
          name_.describe() + " failed in one of its steps" +
          (cause.why.empty() ? "" : "; the cause: " + cause.why + "; the step said") + ": " +
          exception_text(std::current_exception());
      if (name_.watch) name_.watch->failed(name_, cause, error);
      throw WaitError(error, cause, timed_out);
    }
  }

  std::vector<WorkPtr> works_of_last_step() {
    check_process(mark_, name_);
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout_ + kGrace, [&] { return state_ == State::kLastStep; })) {
      lock.unlock();
      throw_wait_failed(name_, {-1, "the ranks of its host and its rail"},
                        std::chrono::steady_clock::now() - start, timeout_, nullptr);
    }
    if (is_dropped_ && cause_) {
      const WaitCause cause = *cause_;
      lock.unlock();
      throw_wait_aborted(name_, cause);
    }
    if (error_) std::rethrow_exception(error_);
    return last_;
  }

  const ProcessMark mark_;
  const CollectiveName name_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Arena> arena_;

  std::vector<CollectiveStep> steps_;  // used by the running thread alone
  const size_t sends_;                 // the last step of the first part
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kQueued;
  bool aborted_ = false;
  bool is_dropped_ = false;
  std::optional<WaitCause> cause_;  // of the abort
  WorkPtr waiting_for_;
  std::vector<WorkPtr> earlier_;  // works of all steps but the last
  std::vector<WorkPtr> last_;
  std::exception_ptr error_;
};

// Runs a part of the steps, and gives the other one to `next`.
class StepJob final : public Job {
 public:
  StepJob(std::shared_ptr<StepwiseWork> work, StepwiseWork::Part part, JobThread& next)
      : work_(std::move(work)), part_(part), next_(next) {}
  void run() noexcept override {
    if (work_->run(part_) &&
        !next_.push(std::make_shared<StepJob>(work_, StepwiseWork::Part::kEnd, next_)))
      work_->abort(std::nullopt);
  }
  void abort() noexcept override { work_->abort(std::nullopt); }

 private:
  const std::shared_ptr<StepwiseWork> work_;
  const StepwiseWork::Part part_;
  JobThread& next_;
};

}  // namespace

WorkPtr run_stepwise(StepThreads& threads, CollectiveName name, std::chrono::milliseconds timeout,
                     std::shared_ptr<Arena> arena, std::vector<CollectiveStep> steps,
                     size_t sends) {
  auto work =
      std::make_shared<StepwiseWork>(name, timeout, std::move(arena), std::move(steps), sends);
  TORCH_CHECK_WITH(
      DistBackendError,
      threads.begin.push(std::make_shared<StepJob>(work, StepwiseWork::Part::kBegin, threads.end)),
      name.describe(), ": the process group was closed");
  return work;
}

}  // namespace tessera
