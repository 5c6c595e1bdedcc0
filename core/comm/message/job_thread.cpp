#include "comm/message/job_thread.h"

#include <utility>

namespace tessera {

JobThread::JobThread() : queue_(std::make_unique<Queue>()) {}

JobThread::~JobThread() {
  // A forked child has the objects that the thread was waiting on; they can't be destroyed without
  // it.
  if (mark_.is_inherited()) {
    static_cast<void>(queue_.release());
  } else {
    stop(std::chrono::milliseconds(0));
  }
}

bool JobThread::push(std::shared_ptr<Job> job) {
  if (mark_.is_inherited()) return false;
  Queue& queue = *queue_;
  std::lock_guard lock(queue.mutex);
  if (queue.stopped) {
    return false;
  }
  queue.jobs.push_back(std::move(job));
  if (!queue.thread.joinable()) queue.thread = std::thread([&queue] { run_jobs(queue); });
  queue.changed.notify_all();
  return true;
}

void JobThread::stop(std::chrono::milliseconds grace) noexcept {
  if (mark_.is_inherited()) return;
  Queue& queue = *queue_;
  std::deque<std::shared_ptr<Job>> dropped;
  {
    std::unique_lock lock(queue.mutex);
    queue.changed.wait_for(lock, grace, [&] { return queue.jobs.empty(); });
    queue.stopped = true;
    // Queued jobs are aborted before the running one, so that none starts to wait when that one
    // returns.
    for (auto job = queue.jobs.rbegin(); job != queue.jobs.rend(); ++job) {
      (*job)->abort();
    }
    queue.changed.notify_all();
  }
  if (queue.thread.joinable()) {
    queue.thread.join();
  }
  std::lock_guard lock(queue.mutex);
  dropped.swap(queue.jobs);
}

void JobThread::run_jobs(Queue& queue) {
  std::unique_lock lock(queue.mutex);
  while (true) {
    queue.changed.wait(lock, [&] { return queue.stopped || !queue.jobs.empty(); });
    if (queue.stopped) {
      return;
    }
    std::shared_ptr<Job> job = queue.jobs.front();
    lock.unlock();
    job->run();
    job.reset();
    lock.lock();
    if (!queue.stopped) {
      // Destroyed without the lock: a job may own tensors with deleters of their own.
      std::shared_ptr<Job> done = std::move(queue.jobs.front());
      queue.jobs.pop_front();
      queue.changed.notify_all();
      lock.unlock();
      done.reset();
      lock.lock();
    }
  }
}

}  // namespace tessera
