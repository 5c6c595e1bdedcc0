#include "launcher/remote_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

/// The launcher of each host sets these.
bool is_of_launcher(std::string_view name) {
  return name == "TESSERA_JOB" || name == "TESSERA_RUN" || name == "TESSERA_RESTART" ||
         name == "TESSERA_FLIGHT_DIR";
}

/// NAME=value of the variables that go to other hosts.
Words passed_variables(const Words& names) {
  Words result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    const bool is_named = std::find(names.begin(), names.end(), name) != names.end();
    if (is_named || name == "OMP_NUM_THREADS" ||
        (name.starts_with("TESSERA_") && !is_of_launcher(name))) {
      result.emplace_back(text);
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

std::string binding_name(Binding binding) { return binding == Binding::kCores ? "cores" : "none"; }

std::string seconds_of(std::chrono::milliseconds time) {
  return fmt::format("{}", static_cast<double>(time.count()) / 1000);
}

Words place_arguments(const HostsStart& start, int node) {
  std::vector<int> ranks;
  for (const Host& host : start.hosts) ranks.push_back(host.ranks);
  return {"--connected",  std::to_string(start.attempt),
          "--job",        start.job,
          "--nodes",      std::to_string(ranks.size()),
          "--node-rank",  std::to_string(node),
          "--node-ranks", fmt::format("{}", fmt::join(ranks, ",")),
          "--master",     fmt::format("[{}]:{}", start.master, start.port)};
}

Words launcher_arguments(const LaunchOptions& launch) {
  Words words = {"--grace", seconds_of(launch.grace), "--interrupt-grace",
                 seconds_of(launch.interrupt_grace)};
  const auto add = [&](bool condition, const Words& more) {
    if (condition) words.insert(words.end(), more.begin(), more.end());
  };
  add(launch.binding != Binding::kAuto, {"--bind", binding_name(launch.binding)});
  add(launch.default_malloc, {"--default-malloc"});
  add(!launch.log_dir.empty(), {"--log-dir", launch.log_dir});
  add(launch.quiet, {"--quiet"});
  add(!launch.prefix, {"--no-prefix"});
  return words;
}

}  // namespace

std::string shell_word(const std::string& text) {
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

Words remote_command(const HostsOptions& options, const HostsStart& start, int node) {
  Words words = {"env"};
  const auto add = [&](const Words& more) { words.insert(words.end(), more.begin(), more.end()); };
  add(passed_variables(options.environment_names));
  add({fs::read_symlink("/proc/self/exe").string(), "run"});
  add(place_arguments(start, node));
  add(launcher_arguments(options.launch));
  add({"--"});
  add(options.launch.command);
  // ssh gives one text to the shell of the user there. exec: the connection ends with the launcher.
  std::string script = fmt::format("cd {} && exec", shell_word(fs::current_path()));
  for (const std::string& word : words) script += " " + shell_word(word);
  Words command = options.ssh;
  command.push_back(start.hosts[node].name);
  command.push_back(script);
  return command;
}

}  // namespace tessera::tools
