#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <tessera/process_group.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "group/collective_form.h"
#include "group/collective_name.h"

namespace tessera {

using BackendWork = c10::intrusive_ptr<c10d::Work>;

/// A small all-reduce that accompanies a collective and compares its form across ranks. A c10d
/// backend's own messages carry no names or sizes, so it would accept a tensor of another
/// collective for the expected one.
class FormComparison {
 public:
  FormComparison(c10d::Backend& backend, const CollectiveForm& form);

  const BackendWork& work() const { return work_; }
  /// Throws `c10::DistBackendError` if ranks have issued different collectives. Call it only after
  /// `work()` has completed.
  void check(const CollectiveName& name) const;

 private:
  CollectiveForm form_;
  at::Tensor told_;
  BackendWork work_;
};

/// A collective made of works of a c10d backend and a `finish` function that `wait()` calls once
/// they have completed.
class BackendProcessGroupWork : public Work {
 public:
  BackendProcessGroupWork(CollectiveName name, std::chrono::milliseconds timeout,
                          std::optional<FormComparison> comparison, std::vector<BackendWork> works,
                          std::function<void()> finish);

  void wait() override;
  bool is_completed() override;

 private:
  void wait_for(const BackendWork& work, std::chrono::steady_clock::time_point start);

  const ProcessMark mark_;
  const CollectiveName name_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::optional<FormComparison> comparison_;
  std::vector<BackendWork> works_;
  std::function<void()> finish_;
};

}  // namespace tessera
