#include "command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

namespace tessera::tools {
namespace {

int usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const std::string help = app.help();  // of the subcommand that was given
  const size_t begin = help.find("Usage:");
  const std::string usage = help.substr(begin, help.find('\n', begin) - begin);
  fmt::print(stderr, "tessera: {}\n{}\nMore is shown by --help.\n", error.what(), usage);
  return 2;
}

/// Whether the arguments stop at a command that only holds others.
bool names_no_action(const CLI::App& app) {
  const CLI::App* innermost = &app;
  while (!innermost->get_subcommands().empty()) innermost = innermost->get_subcommands().front();
  return !innermost->get_subcommands([](const CLI::App*) { return true; }).empty();
}

}  // namespace

int run_command_line(CLI::App& app, std::vector<std::string> arguments, const int& exit_code) {
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
  if (names_no_action(app)) fmt::print("{}", app.help());
  return exit_code;
}

}  // namespace tessera::tools
