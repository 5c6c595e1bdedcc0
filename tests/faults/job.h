#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/linked_hosts.h"
#include "blame.h"
#include "launcher/reserved_port.h"
#include "stranger.h"
#include "trial.h"
#include "watched_process.h"

namespace tessera {

/// The processes of a trial, with everything that they need, and the ranks that they are.
struct FaultJob {
  FaultJob(const Cell& cell, int number, std::string mark);

  /// Starts all ranks, but the culprit if it is to stay away. `name`: that of the job; empty: none.
  /// `job_number`: from 1, if there are several jobs.
  void start(const std::string& scratch, const std::string& name, int job_number);
  WatchedProcess& culprit_process() const { return *processes[culprit]; }
  /// The cause that a rank should name.
  Culprit cause_for(int rank) const;

  const Cell& cell;
  std::string mark;  // an environment variable that tells this trial's processes from others
  int culprit;
  std::unique_ptr<tools::ReservedPort> reserved;
  std::unique_ptr<Stranger> stranger;
  std::unique_ptr<tools::LinkedHosts> hosts;
  int port = 0;
  WatchedProcesses processes;
  std::vector<int> ranks;           // of each process
  std::vector<std::string> titles;  // of each process, for people

 private:
  std::map<std::string, std::string> environment_for(int rank) const;
  int host_of(int rank) const { return cell.hosts * rank / cell.ranks; }
};

}  // namespace tessera
