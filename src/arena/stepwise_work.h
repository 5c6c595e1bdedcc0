#pragma once

#include <tessera/process_group.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "arena/arena.h"
#include "group/collective_name.h"
#include "message/job_thread.h"

namespace tessera {

/// A collective made of collectives of other process groups. Each step starts when the previous one
/// has completed, on the thread that runs the job. The caller of `wait()` completes the last step.
class StepwiseWork final : public Work, public Job {
 public:
  /// Starts the collectives of one step and returns their works.
  using Step = std::function<std::vector<WorkPtr>(const CollectiveTag& tag)>;

  StepwiseWork(CollectiveName name, std::chrono::milliseconds timeout, std::shared_ptr<Arena> arena,
               std::vector<Step> steps);

  void wait() override;
  void wait_inputs() override;
  bool is_completed() override;

  void run() noexcept override;
  void abort() noexcept override;

 private:
  enum class State : uint8_t { kQueued, kRunning, kLastStep };

  void perform_steps();
  void begin_wait(const WorkPtr& work);
  void name_errors(const std::function<void()>& step) const;
  std::vector<WorkPtr> works_of_last_step();

  const ProcessMark mark_;
  const CollectiveName name_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Arena> arena_;

  std::vector<Step> steps_;  // used by the running thread alone
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kQueued;
  bool aborted_ = false;
  WorkPtr waiting_for_;
  std::vector<WorkPtr> earlier_;  // works of all steps but the last
  std::vector<WorkPtr> last_;
  std::exception_ptr error_;
};

}  // namespace tessera
