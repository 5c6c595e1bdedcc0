#pragma once

#include <string>
#include <vector>

#include "launcher/host_list.h"
#include "launcher/launch.h"

namespace tessera::tools {

/// A job whose launchers on several hosts are started from here.
struct HostsOptions {
  LaunchOptions launch;  ///< `ranks`, `place` and `on_stdout` are not used
  std::vector<Host> hosts;
  int min_hosts =
      0;  ///< after hosts were lost, the job goes on with at least so many others; 0: it does not

  /// The program that starts a command on a host, and its arguments; the host's name and the
  /// command are added.
  std::vector<std::string> ssh;
  std::vector<std::string> environment_names;  ///< variables that the ranks get, besides TESSERA_*
  std::string master;                          ///< address of the first host; empty: its name
};

/// The default of `HostsOptions::ssh`: no questions, and a host that does not answer for 15 seconds
/// is lost.
std::vector<std::string> default_ssh();

/// Runs the job and returns its exit status, like `launch()`. When a rank fails or a host is lost,
/// the ranks of all hosts are ended, and the whole job starts again if restarts are left.
int launch_hosts(const HostsOptions& options);

}  // namespace tessera::tools
