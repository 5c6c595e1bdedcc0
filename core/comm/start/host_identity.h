#pragma once

#include <string>

namespace tessera {

/// Returns the name of this host, with ids that differ on other hosts of the same name.
std::string host_identity();

/// Returns the name of this host alone, for messages.
std::string host_name();

/// Returns a text that is the same for processes of this host that see each other's numbers; empty
/// if that is unknown.
std::string process_space();

/// Gives the host another name for this thread, as long as the object lives, so that ranks of one
/// process appear to be on several hosts.
class SimulatedHost {
 public:
  explicit SimulatedHost(std::string name);
  ~SimulatedHost();
  SimulatedHost(const SimulatedHost&) = delete;
  SimulatedHost& operator=(const SimulatedHost&) = delete;
};

}  // namespace tessera
