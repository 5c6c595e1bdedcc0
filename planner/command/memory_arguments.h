#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/command/plan_job.h"

namespace tessera::tools {

/// The options of `tessera plan` about activations, and the memory that there is.
class MemoryArguments {
 public:
  void add_to(CLI::App& plan);

  /// Puts the activations of the model into the job, and the place where it computes. `path`: the
  /// model's file or directory, or empty. Throws `c10::ValueError` if options contradict each
  /// other.
  void apply(PlanJob& job, const std::string& path) const;

  const MemoryLimits& limits() const { return limits_; }
  /// The numbers of ranks of `--table`; none without it.
  std::vector<int> table_ranks() const;
  /// Returns true if memory in a step was asked for.
  bool asks_for_peak() const {
    return limits_.any() || activations_ > 0 || sequence_ || !traced_.empty();
  }

 private:
  MemoryLimits limits_;
  int64_t activations_ = 0;
  std::string traced_;
  int64_t rows_ = 0;
  std::optional<int64_t> batch_, sequence_;
  std::string device_ = "gpu", attention_ = "fused", autocast_, table_;
  bool checkpoint_ = false;
  CLI::Option* table_option_ = nullptr;
};

}  // namespace tessera::tools
