// The command-line tool: starts jobs and measures them.

#include <fmt/format.h>
#include <tessera/version.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "bench_commands.h"
#include "run_command.h"

namespace {

void add_version(CLI::App& app) {
  app.add_subcommand("version", "Prints the versions of Tessera and of LibTorch")->callback([] {
    fmt::print("tessera {}.{}.{} (LibTorch {})\n", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR,
               TESSERA_VERSION_PATCH, TORCH_VERSION);
  });
}

int usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const std::string help = app.help();  // of the subcommand that was given
  const size_t begin = help.find("Usage:");
  const std::string usage = help.substr(begin, help.find('\n', begin) - begin);
  fmt::print(stderr, "tessera: {}\n{}\nMore is shown by --help.\n", error.what(), usage);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  int exit_code = 0;
  std::vector<std::string> arguments(argv + 1, argv + argc);
  std::vector<std::string> command;
  CLI::App app("Tessera: sharded training for LibTorch", "tessera");
  tessera::tools::add_run(app, command, exit_code);
  CLI::App* bench = app.add_subcommand("bench", "Measures");
  tessera::tools::add_comm_bench(*bench, exit_code);
  tessera::tools::add_step_bench(*bench, exit_code);
  add_version(app);

  command = tessera::tools::take_command(app, arguments);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  try {
    app.parse(arguments);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error);
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera: {}\n", error.what());
    return 1;
  }
  const bool nothing_to_do =
      app.get_subcommands().empty() || (bench->parsed() && bench->get_subcommands().empty());
  if (nothing_to_do) fmt::print("{}", app.help());
  return exit_code;
}
