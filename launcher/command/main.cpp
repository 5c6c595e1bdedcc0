// The command-line tool: starts jobs, and passes all other commands on to tessera-bench.
//
// It is not linked with LibTorch, which takes longer to load than a job takes to start.

#include <fmt/format.h>
#include <tessera/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "command/command_line.h"
#include "run_command.h"

namespace {

std::string bench_beside_this() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  return self.parent_path() / "tessera-bench";
}

/// Executes the program beside this one that is linked with LibTorch. Returns only if that fails.
int become_bench(char** argv) {
  const std::string bench = bench_beside_this();
  ::execv(bench.c_str(), argv);
  fmt::print(stderr, "tessera: cannot execute '{}': {}\n", bench, std::strerror(errno));
  return errno == ENOENT ? 127 : 126;
}

/// Prints the versions that this program was built with, then executes the other one, which adds
/// the facts of the library: the first line is there also where LibTorch can't be loaded. Returns
/// the text to print where there is no other one.
std::string version_text() {
  const std::string versions =
      fmt::format("tessera {}.{}.{} (LibTorch {})", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR,
                  TESSERA_VERSION_PATCH, TESSERA_TORCH_VERSION);
  const std::string bench = bench_beside_this();
  if (::access(bench.c_str(), X_OK) == 0) {
    fmt::print("{}\n", versions);
    const char* arguments[] = {"tessera", "--version", nullptr};
    if (std::fflush(stdout) == 0) ::execv(bench.c_str(), const_cast<char**>(arguments));
  }
  return versions + "\nmore is known by tessera-bench, which is not there: " + bench;
}

void add_version(CLI::App& app) {
  const std::string effect =
      "Prints the versions of Tessera, LibTorch and the compiler, and the backends";
  app.set_version_flag("--version", version_text, effect);
  app.add_subcommand("version", effect)->callback([] { fmt::print("{}\n", version_text()); });
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string command_name = arguments.empty() ? "" : arguments.front();
  if (command_name == "bench" || command_name == "plan" || command_name == "ckpt")
    return become_bench(argv);

  int exit_code = 0;
  std::vector<std::string> command;
  CLI::App app("Tessera: sharded training for LibTorch", "tessera");
  tessera::tools::add_run(app, command, exit_code);
  // Listed for the help.
  app.add_subcommand("bench", "Measures collectives, training steps, operators and checkpoints");
  app.add_subcommand("plan", "Computes the memory and traffic of each rank");
  app.add_subcommand("ckpt", "Looks at checkpoints, and converts them");
  add_version(app);
  command = tessera::tools::take_command(app, arguments);
  return tessera::tools::run_command_line(app, std::move(arguments), exit_code);
}
