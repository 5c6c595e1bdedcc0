#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::tools {

/// Adds `run` to start `command` as several ranks. `exit_code` gets the job's exit status.
void add_run(CLI::App& app, const std::vector<std::string>& command, int& exit_code);

/// Moves the program of `run` and its arguments from the end of `arguments` to the result, without
/// interpreting them: they may be options or subcommands of ours.
std::vector<std::string> take_command(const CLI::App& app, std::vector<std::string>& arguments);

}  // namespace tessera::tools
