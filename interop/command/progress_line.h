#pragma once

#include <tessera/checkpoint/checkpoint_files.h>

#include <string>

namespace tessera::tools {

/// Shows the progress of long work on stderr: one line that is overwritten on a terminal, else a
/// line for each tenth.
CheckpointProgress progress_line(const std::string& what);

}  // namespace tessera::tools
