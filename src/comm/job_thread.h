#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace tessera {

/// Something to be done by a `JobThread`.
class Job {
 public:
  virtual ~Job() = default;
  virtual void run() noexcept = 0;
  /// Makes a `run()` in progress return soon. Called from another thread.
  virtual void abort() noexcept = 0;
};

/// A thread that runs jobs in the order in which they were pushed. It starts with the first job.
///
/// Jobs may be pushed from several threads. The owner calls `stop()` once, before destruction.
class JobThread {
 public:
  ~JobThread();

  /// Returns false, and drops the job, after `stop()`.
  bool push(std::shared_ptr<Job> job);

  /// Gives the pushed jobs `grace` to end, aborts what is left and joins the thread.
  void stop(std::chrono::milliseconds grace) noexcept;

 private:
  void run_jobs();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;  // the front one runs
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace tessera
