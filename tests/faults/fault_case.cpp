#include "fault_case.h"

#include <stdexcept>

namespace tessera {

const std::vector<FaultCase>& all_faults() {
  using enum FaultKind;
  using enum Deed;
  static const std::vector<FaultCase> faults = {
      {"killed", "kill -9 after init", kDead, kKill, "driven"},
      {"killed_with_program", "kill -9 with a living child (program)", kDead, kKill, "program"},
      {"killed_with_fork", "kill -9 with a living child (fork)", kDead, kKill, "fork"},
      {"throw_in_forward", "throw in forward", kDead, kOwn, "forward"},
      {"throw_in_backward", "throw in backward", kDead, kOwn, "backward"},
      {"throw_in_loader", "throw in the loader", kDead, kOwn, "loader"},
      {"early_return", "early return", kDead, kOwn, "early_return"},
      {"exits", "exit(3)", kDead, kOwn, "exit"},
      {"crashes", "SIGSEGV", kDead, kOwn, "crash"},
      {"stopped", "SIGSTOP for good", kStuck, kStop, "driven"},
      {"link_down", "link down for good", kStuck, kLinkDown, "driven"},
      {"lone_barrier", "lone barrier", kMismatch, kOwn, "lone_barrier"},
      {"lone_save", "lone save", kMismatch, kOwn, "lone_save"},
      {"lone_clip", "lone clip_grad_norm", kMismatch, kOwn, "lone_clip"},
      {"extra_backward", "extra backward", kMismatch, kOwn, "extra_backward"},
      {"missing_backward", "missing backward", kMismatch, kOwn, "missing_backward"},
      {"skipped_step", "skipped step", kMismatch, kOwn, "skipped_step"},
      {"skipped_batch", "skipped batch", kMismatch, kOwn, "skipped_batch"},
      {"different_model", "different size (model)", kMismatch, kOwn, "different_model"},
      {"different_size", "different size (all_reduce)", kMismatch, kOwn, "different_size"},
      {"different_order", "different order", kMismatch, kOwn, "different_order"},
      {"killed_in_init", "kill -9 during init", kInit, kKillInInit, "none"},
      {"missing", "rank missing at init", kInit, kStayAway, "none"},
      {"silent_port", "silent service on the port", kInit, kSilentPort, "none"},
      {"web_port", "web server on the port", kInit, kWebPort, "none"},
      {"two_jobs", "two jobs on a port, named", kInit, kTwoJobs, "none"},
      {"nameless_jobs", "two jobs on a port, nameless", kInit, kNamelessJobs, "none"},
  };
  return faults;
}

const FaultCase& fault_named(const std::string& name) {
  for (const FaultCase& fault : all_faults()) {
    if (fault.name == name) return fault;
  }
  throw std::invalid_argument("there is no fault " + name);
}

int timeout_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::kStuck:
      return 20;  // ranks report after 10 s and go on waiting
    case FaultKind::kInit:
      return 5;
    default:
      return 10;
  }
}

double goal_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::kDead:
      return 2;
    case FaultKind::kStuck:
      return 10 + 1;  // the waiting after which ranks report, and one second
    case FaultKind::kMismatch:
      return 1;
    case FaultKind::kInit:
      return timeout_of(kind) + 1;
  }
  return 0;
}

}  // namespace tessera
