#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/worker_process.h"

namespace tessera::tools {

/// The answers of the processes of one kind: one entry per rank.
struct RoleResult {
  std::vector<nlohmann::json> prepared;
  std::vector<std::vector<nlohmann::json>> turns;
  std::vector<nlohmann::json> memory;

  /// Returns the median or mean of the seconds of the steps of each turn, over all ranks.
  std::vector<double> turn_medians() const;
  std::vector<double> turn_means() const;

  /// Returns the seconds of all timed steps of all ranks.
  std::vector<double> seconds() const;
  /// Returns the same of one of the parts of a step, in the same order.
  std::vector<double> part_seconds(const std::string& part) const;
};

/// Returns `a` divided by `b`, number by number.
std::vector<double> ratios_of(std::vector<double> a, const std::vector<double>& b);

/// Returns the median of the time of `local`'s steps, had the optimizer worked on the part of one
/// of `ranks` ranks only.
double limit_seconds(const RoleResult& local, int ranks);

/// Processes that are asked together.
class Team {
 public:
  Team(std::string name, WorkerProcesses workers)
      : name_(std::move(name)), workers_(std::move(workers)) {}

  const std::string& name() const { return name_; }
  std::vector<nlohmann::json> ask(const std::string& verb, int64_t number);

  RoleResult result;

 private:
  const std::string name_;
  WorkerProcesses workers_;
};

/// Shows how far the benchmark `bench` is, on stderr.
void show_progress(const char* bench, const std::string& text);

}  // namespace tessera::tools
