// The command-line tool: starts jobs, and passes all other commands on to programs beside it.
//
// It is not linked with LibTorch: that takes longer to load than a job takes to start.

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

std::string beside_this(const char* name) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  return self.parent_path() / name;
}

/// Executes a program beside this one. Returns only if that fails.
int become(const char* name, char** argv) {
  const std::string program = beside_this(name);
  ::execv(program.c_str(), argv);
  fmt::print(stderr, "tessera: cannot execute '{}': {}\n", program, std::strerror(errno));
  return errno == ENOENT ? 127 : 126;
}

/// Prints the versions that this program was built with, then executes the other one to add the
/// facts of the library: the first line is there also where LibTorch can't be loaded. Returns the
/// text to print where there is no other one.
std::string version_text() {
  const std::string versions =
      fmt::format("tessera {}.{}.{} (LibTorch {})", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR,
                  TESSERA_VERSION_PATCH, TESSERA_TORCH_VERSION);
  const std::string bench = beside_this("tessera-bench");
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
    return become("tessera-bench", argv);
  if (command_name == "flight") return become("tessera-flight", argv + 1);

  int exit_code = 0;
  std::vector<std::string> command;
  CLI::App app("Tessera: sharded training for LibTorch", "tessera");
  tessera::tools::add_run(app, command, exit_code);
  // Listed for the help.
  app.add_subcommand("flight", "Shows the flight records that ranks left in a folder");
  app.add_subcommand("bench", "Measures training steps");
  app.add_subcommand("plan", "Computes the memory and traffic of each rank");
  app.add_subcommand("ckpt", "Looks at checkpoints, and converts them");
  add_version(app);
  command = tessera::tools::take_command(app, arguments);
  return tessera::tools::run_command_line(app, std::move(arguments), exit_code);
}
