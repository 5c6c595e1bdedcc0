#pragma once

#include <tessera/planner/step_time.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

namespace tessera::tools {

/// The options of `tessera plan` about hosts, links and computation.
class StepArguments {
 public:
  void add_to(CLI::App& plan);

  /// Returns the options of `step_time()`, or nothing if no step is to be timed. Throws
  /// `c10::ValueError` if options contradict each other. `ranks` is that of `--ranks`, or empty.
  std::optional<StepTimeOptions> options(std::optional<int> ranks) const;

  /// Returns the ranks on each host; if that is not given, `ranks`.
  int ranks_per_host(int ranks) const;

 private:
  StepTimeOptions options_;
  std::optional<int> hosts_, ranks_per_host_;
  CLI::Option* link_ = nullptr;
  CLI::Option* compute_ = nullptr;
};

}  // namespace tessera::tools
