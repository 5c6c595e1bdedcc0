#pragma once

namespace CLI {
class App;
}

namespace tessera::tools {

/// Adds `plan`, which tells what a plan keeps and sends.
void add_plan(CLI::App& app, int& exit_code);

}  // namespace tessera::tools
