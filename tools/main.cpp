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

#include "command_line.h"
#include "run_command.h"

namespace {

/// Executes the program beside this one that is linked with LibTorch. Returns only if that fails.
int become_bench(char** argv) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string bench = self.parent_path() / "tessera-bench";
  ::execv(bench.c_str(), argv);
  fmt::print(stderr, "tessera: cannot execute '{}': {}\n", bench, std::strerror(errno));
  return errno == ENOENT ? 127 : 126;
}

void add_version(CLI::App& app) {
  app.add_subcommand("version", "Prints the versions of Tessera and of LibTorch")->callback([] {
    fmt::print("tessera {}.{}.{} (LibTorch {})\n", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR,
               TESSERA_VERSION_PATCH, TESSERA_TORCH_VERSION);
  });
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
