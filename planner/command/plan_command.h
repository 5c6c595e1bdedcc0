#pragma once

namespace CLI {
class App;
}

namespace tessera::tools {

/// Adds `plan`, which prints the memory and the traffic of a plan.
void add_plan(CLI::App& app, int& exit_code);

}  // namespace tessera::tools
