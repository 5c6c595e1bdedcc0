#include "command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace tessera::tools {
namespace {

constexpr int kNotDone = 2;

// Never throws: if the message can't be written, the exit status still tells.
void complain(const std::string& text) { std::fputs(("tessera: " + text + "\n").c_str(), stderr); }

int usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const std::string help = app.help();  // of the subcommand that was given
  const size_t begin = help.find("Usage:");
  const std::string usage = help.substr(begin, help.find('\n', begin) - begin);
  complain(fmt::format("{}\n{}\nMore is shown by --help.", error.what(), usage));
  return kNotDone;
}

/// Returns whether the arguments stop at a command that only holds others.
bool names_no_action(const CLI::App& app) {
  const CLI::App* innermost = &app;
  while (!innermost->get_subcommands().empty()) innermost = innermost->get_subcommands().front();
  return !innermost->get_subcommands([](const CLI::App*) { return true; }).empty();
}

int run(CLI::App& app, std::vector<std::string> arguments, const int& exit_code) {
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  try {
    app.parse(arguments);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error);
  } catch (const std::exception& error) {
    complain(error.what());
    return 1;
  }
  if (names_no_action(app)) std::fputs(app.help().c_str(), stdout);
  return exit_code;
}

}  // namespace

int run_command_line(CLI::App& app, std::vector<std::string> arguments, const int& exit_code) {
  const int status = run(app, std::move(arguments), exit_code);
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  complain(fmt::format("could not write the output{}{}", errno == 0 ? "" : ": ",
                       errno == 0 ? "" : std::strerror(errno)));
  return kNotDone;
}

// In the units of the ZeRO paper: 1 GB is 1e9 bytes.
std::string bytes_text(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.1f} GB", bytes / 1e9);
  if (bytes >= 1e6) return fmt::format("{:.1f} MB", bytes / 1e6);
  if (bytes >= 1e3) return fmt::format("{:.1f} kB", bytes / 1e3);
  return fmt::format("{:.0f} B", bytes);
}

}  // namespace tessera::tools
