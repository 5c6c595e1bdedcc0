#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::tools {

/// Parses `arguments`, which runs the callbacks of what was given, and returns the exit status:
/// what the callbacks left in `exit_code`, or 2 after telling what is wrong with the arguments, or
/// that the output could not be written. If they name no command, or one that only holds others,
/// help is printed.
int run_command_line(CLI::App& app, std::vector<std::string> arguments, const int& exit_code);

}  // namespace tessera::tools
