#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::tools {

/// A host of a job, and the number of its ranks.
struct Host {
  std::string name;  ///< "b", "10.0.0.2"
  int ranks = 0;
};

/// Reads "a:2,b:2" or, with IPv6, "[fd00::1]:2". Hosts without a number get `default_ranks`; 0:
/// each needs its number. Throws `std::invalid_argument`.
std::vector<Host> parse_hosts(const std::string& text, int default_ranks);

/// Reads "HOST", "HOST:PORT" or "[ADDRESS]:PORT". The port is `default_port` if there is none.
/// Throws `std::invalid_argument`.
std::pair<std::string, int> parse_master(const std::string& text, int default_port);

}  // namespace tessera::tools
