#include "comm/message/exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

namespace tessera {
namespace {

// How much longer a caller waits than the thread that works for it, whose error says more.
constexpr std::chrono::milliseconds kGrace{500};

}  // namespace

Exchange::Exchange(CollectiveName name, std::chrono::milliseconds timeout, bool runs_in_wait)
    : name_(std::move(name)), timeout_(timeout), runs_in_wait_(runs_in_wait) {}

bool Exchange::outputs_done() {
  if (is_inherited()) return step_ >= Step::kOutputsDone;
  return reached(Step::kOutputsDone);
}

bool Exchange::reached(Step step) {
  std::lock_guard lock(mutex_);
  return error_ != nullptr || step_ >= step;
}

bool Exchange::inputs_done() { return reached(Step::kInputsDone); }

bool Exchange::claim_queueing() {
  std::lock_guard lock(mutex_);
  return !std::exchange(queued_, true);
}

void Exchange::run() noexcept {
  std::unique_lock lock(mutex_);
  while (step_ != Step::kInputsDone && !error_) {
    if (advancing_) {
      changed_.wait(lock);  // the other thread is bounded by the timeout
    } else {
      advance(lock);
    }
  }
}

void Exchange::abort() noexcept {
  std::lock_guard lock(mutex_);
  abort_locked();
}

void Exchange::abort(const WaitCause& cause) noexcept {
  std::lock_guard lock(mutex_);
  if (!cause_) cause_ = cause;
  abort_locked();
}

void Exchange::abort_locked() noexcept {
  aborted_ = true;
  if (waiting_for_) {
    try {
      waiting_for_->abort();
    } catch (...) {  // the wait then ends by its timeout
    }
  }
}

void Exchange::wait_until(Step step) {
  if (is_inherited()) {  // a thread that is not in this process may have the lock
    if (step_ < step) check_process(mark_, name_);
    return;
  }
  const auto start = Clock::now();
  std::shared_ptr<void> watched;
  if (name_.watch && !reached(step))
    watched = name_.watch->begin_wait(name_, [this](const WaitCause& cause) { abort(cause); });
  std::unique_lock lock(mutex_);
  while (step_ < step) {
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (runs_in_wait_ && !advancing_) {
      advance(lock);
    } else if (changed_.wait_until(lock, start + timeout_ + kGrace) == std::cv_status::timeout &&
               step_ < step && !error_) {
      lock.unlock();
      throw_wait_failed(name_, Awaited::all(), Clock::now() - start, timeout_, nullptr);
    }
  }
}

// Performs the next step without the lock.
void Exchange::advance(std::unique_lock<std::mutex>& lock) {
  const Step next = step_ == Step::kPosted ? Step::kOutputsDone : Step::kInputsDone;
  advancing_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    perform(next);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  advancing_ = false;
  if (error) {
    error_ = error;
  } else {
    step_ = next;
  }
  if (!error && next == Step::kOutputsDone && name_.watch) name_.watch->completed(name_.record);
  changed_.notify_all();
}

void Exchange::perform(Step step) {
  started_ = Clock::now();
  try {
    if (step == Step::kOutputsDone) {
      complete_outputs();
    } else {
      complete_inputs();
    }
  } catch (const c10::Error&) {  // names the collective already
    throw;
  } catch (...) {  // Gloo refused a message that was posted in the step
    throw_wait_failed(name_, Awaited::all(), Clock::now() - started_, timeout_,
                      std::current_exception());
  }
}

void Exchange::wait(const Transfer& transfer, const Awaited& whom) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(started_ + timeout_ - Clock::now());
  bool aborted = false;
  std::optional<WaitCause> cause;
  {
    std::lock_guard lock(mutex_);
    aborted = aborted_;
    waiting_for_ = transfer.work;
  }
  std::exception_ptr error;
  bool completed = false;
  try {
    // Zero would mean no timeout at all.
    completed = !aborted && transfer.work->wait(std::max(left, std::chrono::milliseconds(1)));
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::lock_guard lock(mutex_);
    waiting_for_.reset();
    aborted = aborted_;
    cause = cause_;
  }
  if (aborted && cause) throw_wait_aborted(name_, *cause);
  if (error) {
    throw_wait_failed(name_, whom, Clock::now() - started_, timeout_, error);
  }
  TORCH_CHECK_WITH(DistBackendError, completed, name_.describe(), " gave up waiting for ",
                   whom.text, ": the process group was closed");
}

ExchangeWork::ExchangeWork(std::shared_ptr<Exchange> exchange, std::weak_ptr<JobThread> thread)
    : exchange_(std::move(exchange)), thread_(std::move(thread)) {}

ExchangeWork::~ExchangeWork() {
  // In a forked child, objects that the parent's threads wait on can't be destroyed without them.
  if (exchange_->is_inherited()) {
    static_cast<void>(new std::shared_ptr<Exchange>(std::move(exchange_)));
    return;
  }
  // Dropping messages in transit would break the connections of the peers.
  if (!exchange_->inputs_done()) {
    try {
      queue();
    } catch (...) {  // no thread can be started: the peers time out
    }
  }
}

bool ExchangeWork::is_completed() {
  if (exchange_->outputs_done()) {
    return true;
  }
  if (exchange_->is_inherited()) return false;
  // Gloo can't be asked whether a message has arrived: a thread waits for it instead.
  queue();
  return false;
}

void ExchangeWork::queue() {
  if (exchange_->claim_queueing()) {
    if (const auto thread = thread_.lock()) {
      thread->push(exchange_);
    }
  }
}

}  // namespace tessera
