#pragma once

#include <tessera/comm/process_group.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "base/memory/process_mark.h"
#include "comm/group/collective_name.h"
#include "comm/group/interruption.h"
#include "comm/message/job_thread.h"
#include "comm/message/mailbox.h"

namespace tessera {

/// A collective made of messages between pairs of ranks. They have been posted already.
///
/// It has two steps, each done once: the outputs (wait for the messages of the peers, sum) and the
/// inputs (wait until the peers have this rank's messages). One thread at a time performs them: a
/// thread of the process group or, if `runs_in_wait`, the waiting thread.
class Exchange : public Job {
 public:
  Exchange(CollectiveName name, std::chrono::milliseconds timeout, bool runs_in_wait);

  void wait_outputs() { interruptible(&Exchange::wait_until, this, Step::kOutputsDone); }
  void wait_inputs() { interruptible(&Exchange::wait_until, this, Step::kInputsDone); }
  bool outputs_done();
  bool inputs_done();
  /// True in a forked child, where no thread finishes steps that were not done before the fork.
  bool is_inherited() const { return mark_.is_inherited(); }
  /// True on the first call: the caller must then give the exchange to a thread.
  bool claim_queueing();

  void run() noexcept override;
  void abort() noexcept override;

  /// Makes a wait in progress, and all later ones, throw an error that gives the cause. Called from
  /// another thread.
  void abort(const WaitCause& cause) noexcept;

  /// Runs `post` to post messages. An exception that it throws becomes a named error.
  template <class Post>
  void post(const Post& post_messages) {
    try {
      post_messages();
    } catch (...) {
      throw_wait_failed(name_, Awaited::all(), std::chrono::seconds(0), timeout_,
                        std::current_exception());
    }
  }

 protected:
  virtual void complete_outputs() = 0;
  virtual void complete_inputs() = 0;

  /// Waits for one message until the deadline of the current step. Errors say that this rank waited
  /// for `whom`.
  void wait(const Transfer& transfer, const Awaited& whom);
  void wait(const Transfer& transfer) { wait(transfer, Awaited::one(transfer.peer)); }

 private:
  enum class Step : uint8_t { kPosted, kOutputsDone, kInputsDone };
  using Clock = std::chrono::steady_clock;

  bool reached(Step step);
  void wait_until(Step step);
  void advance(std::unique_lock<std::mutex>& lock);
  void perform(Step step);
  void abort_locked() noexcept;

  const ProcessMark mark_;
  const CollectiveName name_;
  const std::chrono::milliseconds timeout_;
  const bool runs_in_wait_;

  std::mutex mutex_;
  std::condition_variable changed_;
  Step step_ = Step::kPosted;
  bool advancing_ = false;  // a thread is in complete_*()
  bool queued_ = false;
  bool aborted_ = false;
  std::optional<WaitCause> cause_;  // of the abort; none: the process group was closed
  std::exception_ptr error_;
  c10::intrusive_ptr<c10d::Work> waiting_for_;
  Clock::time_point started_;  // of the current step; used by the advancing thread alone
};

/// The caller's handle. If it is destroyed before the collective has ended, `thread` completes the
/// collective.
class ExchangeWork : public Work {
 public:
  ExchangeWork(std::shared_ptr<Exchange> exchange, std::weak_ptr<JobThread> thread);
  ~ExchangeWork() override;

  void wait() override { exchange_->wait_outputs(); }
  void wait_inputs() override { exchange_->wait_inputs(); }
  bool is_completed() override;
  /// Makes a wait in progress fail soon. Called from another thread.
  void abort() noexcept { exchange_->abort(); }

 private:
  void queue();

  std::shared_ptr<Exchange> exchange_;
  std::weak_ptr<JobThread> thread_;
};

}  // namespace tessera
