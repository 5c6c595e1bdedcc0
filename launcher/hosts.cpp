#include "launcher/hosts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string_view>

#include "launcher/child.h"
#include "launcher/job_token.h"

namespace tessera::tools {
namespace {

using Words = std::vector<std::string>;

/// Below the ports that systems give to programs that ask for any.
constexpr int kFirstPort = 20000, kPorts = 10000;

/// Names of the variables that go to other hosts; sets those that are given as NAME=VALUE. The
/// launcher there sets the excluded ones.
Words passed_variables(Words names) {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry, name = text.substr(0, text.find('='));
    const bool is_of_launcher = name == "TESSERA_JOB" || name == "TESSERA_RUN" ||
                                name == "TESSERA_RESTART" || name == "TESSERA_FLIGHT_DIR";
    if (name == "OMP_NUM_THREADS" || name == "NO_COLOR" ||
        (name.starts_with("TESSERA_") && !is_of_launcher))
      names.emplace_back(name);
  }
  for (std::string& name : names) {
    const size_t equals = name.find('=');
    if (equals == std::string::npos) continue;
    ::setenv(name.substr(0, equals).c_str(), name.c_str() + equals + 1, /*overwrite=*/1);
    name.resize(equals);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

int random_port() {
  std::random_device device;
  return std::uniform_int_distribution<int>(kFirstPort, kFirstPort + kPorts - 1)(device);
}

Words mpirun_command(const HostsOptions& options) {
  const LaunchOptions& launch = options.launch;
  Words names, words = {"mpirun", "--quiet", "--bind-to", "none"};
  std::vector<int> ranks;
  for (const Host& host : options.hosts) {
    names.push_back(host.name + ":1");
    ranks.push_back(host.ranks);
  }
  const auto add = [&](const Words& more, bool condition = true) {
    if (condition) words.insert(words.end(), more.begin(), more.end());
  };
  // mpirun passes the values on through its own connections: command lines are everybody's to read.
  if (std::getenv("TESSERA_SECRET") == nullptr)
    ::setenv("TESSERA_SECRET", random_job_token().c_str(), /*overwrite=*/1);
  add({"--allow-run-as-root"}, ::geteuid() == 0);
  add({"--mca", "plm_rsh_agent", options.ssh}, !options.ssh.empty());
  for (const std::string& name : passed_variables(options.environment_names)) add({"-x", name});
  add({"-n", std::to_string(names.size()), "--host", fmt::format("{}", fmt::join(names, ","))});
  const std::string master = options.master.empty() ? options.hosts[0].name : options.master;
  const int port = launch.master_port > 0 ? launch.master_port : random_port();
  add({std::filesystem::read_symlink("/proc/self/exe").string(), "run", "--nodes",
       std::to_string(ranks.size()), "--node-ranks", fmt::format("{}", fmt::join(ranks, ",")),
       "--master", fmt::format("[{}]:{}", master, port), "--job", random_job_token()});
  add({"--grace", fmt::format("{}", std::chrono::duration<double>(launch.grace).count()),
       "--max-restarts", std::to_string(launch.max_restarts)});
  add({"--bind", launch.binding == Binding::kCores ? "cores" : "none"},
      launch.binding != Binding::kAuto);
  add({"--default-malloc"}, launch.default_malloc);
  add({"--log-dir", launch.log_dir}, !launch.log_dir.empty());
  add({"--quiet"}, launch.quiet);
  add({"--no-prefix"}, !launch.prefix);
  add({"--"});
  add(launch.command);
  return words;
}

}  // namespace

int launch_hosts(const HostsOptions& options) {
  // mpirun shows a terminal to what it starts, whether it has one or not.
  if (::isatty(STDOUT_FILENO) == 0) ::setenv("NO_COLOR", "1", /*overwrite=*/0);
  const Words words = mpirun_command(options);
  ::execvp(words[0].c_str(), argument_pointers(words).data());
  const int error = errno;
  fmt::print(stderr,
             "tessera run: --hosts needs mpirun of Open MPI (Debian: openmpi-bin): {}. Without it, "
             "start `tessera run --nodes N --node-rank K --master HOST` on each host\n",
             std::strerror(error));
  return error == ENOENT ? 127 : 126;
}

}  // namespace tessera::tools
