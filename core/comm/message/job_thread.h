#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "base/memory/process_mark.h"

namespace tessera {

/// A job for a `JobThread`.
class Job {
 public:
  virtual ~Job() = default;
  virtual void run() noexcept = 0;
  /// Makes a `run()` in progress return soon. Called from another thread.
  virtual void abort() noexcept = 0;
};

/// A thread that runs jobs in the order in which they were pushed. It starts with the first job.
///
/// Jobs may be pushed from several threads. The owner calls `stop()` once, before destruction. In a
/// forked child, where the thread does not exist, jobs are dropped.
class JobThread {
 public:
  JobThread();
  ~JobThread();
  JobThread(const JobThread&) = delete;
  JobThread& operator=(const JobThread&) = delete;

  /// Returns false, and drops the job, after `stop()`.
  bool push(std::shared_ptr<Job> job);

  /// Gives the pushed jobs `grace` to end, aborts the rest and joins the thread.
  void stop(std::chrono::milliseconds grace) noexcept;

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Job>> jobs;  // the front one runs
    bool stopped = false;
    std::thread thread;
  };

  static void run_jobs(Queue& queue);

  const ProcessMark mark_;
  std::unique_ptr<Queue> queue_;
};

}  // namespace tessera
