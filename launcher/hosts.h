#pragma once

#include <string>
#include <vector>

#include "launcher/host_list.h"
#include "launcher/launch.h"

namespace tessera::tools {

/// A job over hosts, on each of which mpirun starts this launcher.
struct HostsOptions {
  LaunchOptions launch;  ///< `ranks`, `place` and `on_stdout` are not used
  std::vector<Host> hosts;
  std::string master;                          ///< address of the first host; empty: its name
  std::vector<std::string> environment_names;  ///< variables that the ranks get, besides TESSERA_*
  std::string ssh;  ///< the program that mpirun starts in place of ssh; empty: ssh
};

/// Becomes mpirun; returns the exit status only if that can't be executed.
int launch_hosts(const HostsOptions& options);

}  // namespace tessera::tools
