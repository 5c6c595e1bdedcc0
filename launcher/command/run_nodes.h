#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/hosts.h"
#include "launcher/launch.h"

namespace CLI {
class App;
}

namespace tessera::tools {

/// The options of `tessera run` for jobs over several machines, as they were given.
struct NodeArguments {
  int nodes = 0;
  int node_rank = -1;
  std::string node_ranks;
  std::string master;
  std::string job;
  std::string hosts;
  std::string ssh;
  std::vector<std::string> environment_names;
};

void add_node_options(CLI::App& run, NodeArguments& arguments);

/// Returns this machine's place if the options name one. Throws `CLI::ValidationError` for options
/// that contradict each other, as do the others.
std::optional<NodePlace> node_place(NodeArguments arguments, const LaunchOptions& launch);

/// Returns the job over the hosts of `--hosts`, if it was given.
std::optional<HostsOptions> hosts_options(const NodeArguments& arguments,
                                          const LaunchOptions& launch);

}  // namespace tessera::tools
