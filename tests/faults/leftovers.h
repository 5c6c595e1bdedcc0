#pragma once

#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace tessera {

/// Finds things of a job that outlive it: its processes, files in /dev/shm and mounts of tmpfs.
class Leftovers {
 public:
  /// To be made before the job, whose processes have `mark` ("NAME=value") in their environment.
  explicit Leftovers(std::string mark);

  /// Waits up to `seconds` for the job to be gone; describes whatever is left then. Processes in
  /// `expected` are the fault's own.
  std::vector<std::string> after(double seconds, const std::set<pid_t>& expected) const;
  /// Kills the processes of the job that are left.
  void kill() const;

 private:
  std::vector<std::string> left_now(const std::set<pid_t>& expected) const;

  std::string mark_;
  std::set<std::string> files_, mounts_;  // before the job
};

}  // namespace tessera
