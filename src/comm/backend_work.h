#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/process_group.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/collective_name.h"

namespace tessera {

using BackendWork = c10::intrusive_ptr<c10d::Work>;

/// A collective made of works of a c10d backend, and of what is left to do when they have ended.
class BackendProcessGroupWork : public Work {
 public:
  BackendProcessGroupWork(CollectiveName name, std::chrono::milliseconds timeout,
                          std::vector<BackendWork> works, std::function<void()> finish);

  void wait() override;
  bool is_completed() override;

 private:
  void wait_for(const BackendWork& work, std::chrono::steady_clock::time_point start);

  const ProcessMark mark_;
  const CollectiveName name_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::vector<BackendWork> works_;
  std::function<void()> finish_;
};

}  // namespace tessera
