#pragma once

#include <string>
#include <vector>

namespace tessera {

/// How a fault shows itself to the other ranks; each kind has its own goal.
enum class FaultKind { kDead, kStuck, kMismatch, kInit };

/// How a fault comes about: by the culprit itself, or by the driver.
enum class Deed {
  kOwn,           ///< the culprit commits it, and prints so
  kKill,          ///< SIGKILL during training
  kKillInInit,    ///< SIGKILL within a second of the start
  kStop,          ///< SIGSTOP during training
  kStayAway,      ///< the culprit is not started
  kSilentPort,    ///< another service listens on the port, and never answers
  kWebPort,       ///< a web server listens on the port
  kTwoJobs,       ///< two jobs with one port, and different names
  kNamelessJobs,  ///< two jobs with one port, and without names
  kLinkDown,      ///< the link between two hosts goes down
};

struct FaultCase {
  std::string name;  ///< of the test
  std::string text;  ///< in the table
  FaultKind kind;
  Deed deed;
  std::string role;  ///< the fault that the worker is told to commit
  /// Whether ranks are in a step then, and in one of its collectives.
  bool is_in_step() const { return kind != FaultKind::kInit && role != "different_model"; }
};

const std::vector<FaultCase>& all_faults();
const FaultCase& fault_named(const std::string& name);

/// TESSERA_TIMEOUT of the ranks, in seconds.
int timeout_of(FaultKind kind);
/// The longest time, in seconds, that should pass until all survivors have named the culprit.
double goal_of(FaultKind kind);

}  // namespace tessera
