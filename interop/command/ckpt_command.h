#pragma once

namespace CLI {
class App;
}

namespace tessera::tools {

/// Adds `ckpt`: operations on checkpoints on disk.
void add_ckpt(CLI::App& app, int& exit_code);

}  // namespace tessera::tools
