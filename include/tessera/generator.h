#pragma once

#include <ATen/core/Generator.h>
#include <tessera/export.h>

#include <cstdint>

namespace tessera {

/// Seeds what the calling rank draws its random numbers from when it names no generator.
///
/// In a process this is `torch::manual_seed()`. Ranks of `spawn()` have a CPU generator each, which
/// starts as a copy of the process's: there it seeds the calling rank's alone, and the generators
/// of devices stay as they are. `torch::manual_seed()` would seed the one that no rank draws from;
/// the next draw of any rank after that throws.
TESSERA_API void manual_seed(uint64_t seed);

/// The CPU generator that the calling rank draws from when it names none: on a rank of `spawn()`
/// its own, elsewhere LibTorch's default generator.
///
/// The state to save and set is that of this generator. Lock its `mutex()` while you use it from
/// several threads.
TESSERA_API at::Generator default_generator();

}  // namespace tessera
