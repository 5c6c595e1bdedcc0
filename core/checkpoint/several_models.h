#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <vector>

namespace tessera {

/// Throws `c10::ValueError` unless there are models, with distinct names that may be those of
/// directories.
void check_models(const std::vector<CheckpointModel>& models);

}  // namespace tessera
