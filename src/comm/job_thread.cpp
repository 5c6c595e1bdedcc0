#include "comm/job_thread.h"

#include <utility>

#include "comm/no_sigpipe.h"

namespace tessera {

JobThread::~JobThread() { stop(std::chrono::milliseconds(0)); }

bool JobThread::push(std::shared_ptr<Job> job) {
  std::lock_guard lock(mutex_);
  if (stopped_) {
    return false;
  }
  jobs_.push_back(std::move(job));
  if (!thread_.joinable()) {
    const NoSigpipe no_sigpipe;  // for all that it sends
    thread_ = std::thread([this] { run_jobs(); });
  }
  changed_.notify_all();
  return true;
}

void JobThread::stop(std::chrono::milliseconds grace) noexcept {
  std::deque<std::shared_ptr<Job>> dropped;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, grace, [&] { return jobs_.empty(); });
    stopped_ = true;
    // Aborted before the running one, so that none starts to wait when that one returns.
    for (auto job = jobs_.rbegin(); job != jobs_.rend(); ++job) {
      (*job)->abort();
    }
    changed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  std::lock_guard lock(mutex_);
  dropped.swap(jobs_);
}

void JobThread::run_jobs() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopped_ || !jobs_.empty(); });
    if (stopped_) {
      return;
    }
    std::shared_ptr<Job> job = jobs_.front();
    lock.unlock();
    job->run();
    job.reset();
    lock.lock();
    if (!stopped_) {
      // Destroyed without the lock: a job may own tensors with deleters of their own.
      std::shared_ptr<Job> done = std::move(jobs_.front());
      jobs_.pop_front();
      changed_.notify_all();
      lock.unlock();
      done.reset();
      lock.lock();
    }
  }
}

}  // namespace tessera
