#pragma once

#include <ATen/core/Generator.h>
#include <tessera/export.h>

#include <cstdint>

namespace tessera {

/// Seeds the generator from which the calling rank draws its random numbers by default.
///
/// In a process this is `torch::manual_seed()`. Ranks of `spawn()` have a CPU generator each, at
/// first a copy of the process's; there this function seeds the calling rank's generator and that
/// of the current accelerator, if there is one: set the rank's device as the current one before.
/// `torch::manual_seed()` would seed a generator from which no rank draws; the next draw of any
/// rank after that throws.
TESSERA_API void manual_seed(uint64_t seed);

/// Returns the CPU generator from which the calling rank draws by default: on a rank of `spawn()`
/// its own, elsewhere LibTorch's default generator.
///
/// This is the generator whose state is to be saved and restored. Lock its `mutex()` while several
/// threads use it.
TESSERA_API at::Generator default_generator();

}  // namespace tessera
