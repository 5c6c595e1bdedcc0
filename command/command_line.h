#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::tools {

/// Parses `arguments`, runs the callbacks of the commands in them, and returns the exit status: the
/// one that the callbacks left in `exit_code`; 2 after a message that the arguments are wrong, or
/// that the output could not be written; 1 after that of another error. Prints help if the
/// arguments name no command, or one that only holds others.
int run_command_line(CLI::App& app, std::vector<std::string> arguments, const int& exit_code);

/// Returns a number of bytes as text: `24.0 GB`, with 1e9 bytes each.
std::string bytes_text(double bytes);

}  // namespace tessera::tools
