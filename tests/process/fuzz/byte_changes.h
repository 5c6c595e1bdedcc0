#pragma once

#include <string>

#include "process/fuzz/draw.h"

namespace tessera::testing {

/// Changes a few bytes of `text`, of which the first `most` are chosen more often: flips bits, sets
/// numbers, cuts, repeats and moves parts.
void change_bytes(std::string& text, Draw& draw, size_t most = SIZE_MAX);

}  // namespace tessera::testing
