#pragma once

#include <tessera/checkpoint_files.h>

#include <string>

namespace tessera::tools {

/// Shows on stderr how far a long work is: one line that is written over on a terminal, else a line
/// for each tenth.
CheckpointProgress progress_line(const std::string& what);

}  // namespace tessera::tools
