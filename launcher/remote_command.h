#pragma once

#include <string>
#include <vector>

#include "launcher/launch_hosts.h"

namespace tessera::tools {

/// One start of a job on several hosts.
struct HostsStart {
  std::vector<Host> hosts;
  std::string master;
  int port = 0;
  std::string job;
  int attempt = 0;
};

/// Returns the program and the arguments that start the launcher of `start.hosts[node]` there, in
/// the working directory and with the variables of this process.
std::vector<std::string> remote_command(const HostsOptions& options, const HostsStart& start,
                                        int node);

/// Returns `text` as one word of a POSIX shell.
std::string shell_word(const std::string& text);

}  // namespace tessera::tools
