#include "launcher/hosts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string_view>

#include "launcher/job_token.h"

namespace tessera::tools {
namespace {

using Words = std::vector<std::string>;

/// Below the ports that systems give to programs that ask for any.
constexpr int kFirstPort = 20000, kPorts = 10000;

std::string seconds_of(std::chrono::milliseconds time) {
  return fmt::format("{}", static_cast<double>(time.count()) / 1000);
}

/// Names of the variables that go to other hosts. The launcher there sets the excluded ones.
Words passed_variables(Words names) {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry, name = text.substr(0, text.find('='));
    const bool is_of_launcher = name == "TESSERA_JOB" || name == "TESSERA_RUN" ||
                                name == "TESSERA_RESTART" || name == "TESSERA_FLIGHT_DIR";
    if (name == "OMP_NUM_THREADS" || name == "NO_COLOR" ||
        (name.starts_with("TESSERA_") && !is_of_launcher))
      names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

Words mpirun_command(const HostsOptions& options, int port) {
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
  add({"--allow-run-as-root"}, ::geteuid() == 0);
  add({"--mca", "plm_rsh_agent", options.ssh}, !options.ssh.empty());
  for (const std::string& name : passed_variables(options.environment_names)) add({"-x", name});
  add({"-n", std::to_string(names.size()), "--host", fmt::format("{}", fmt::join(names, ","))});
  const std::string master = options.master.empty() ? options.hosts[0].name : options.master;
  if (launch.master_port > 0) port = launch.master_port;
  add({std::filesystem::read_symlink("/proc/self/exe").string(), "run", "--nodes",
       std::to_string(ranks.size()), "--node-ranks", fmt::format("{}", fmt::join(ranks, ",")),
       "--master", fmt::format("[{}]:{}", master, port), "--job", random_job_token()});
  add({"--grace", seconds_of(launch.grace), "--interrupt-grace", seconds_of(launch.interrupt_grace),
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

int launch_hosts(const HostsOptions& options) {
  std::random_device device;
  const int port = std::uniform_int_distribution<int>(kFirstPort, kFirstPort + kPorts - 1)(device);
  // mpirun shows a terminal to what it starts, whether it has one or not.
  if (::isatty(STDOUT_FILENO) == 0) ::setenv("NO_COLOR", "1", /*overwrite=*/0);
  const Words words = mpirun_command(options, port);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  const int error = errno;
  fmt::print(stderr,
             "tessera run: --hosts needs mpirun of Open MPI (Debian: openmpi-bin): {}. Without it, "
             "start `tessera run --nodes N --node-rank K --master HOST` on each host\n",
             std::strerror(error));
  return error == ENOENT ? 127 : 126;
}

}  // namespace tessera::tools
