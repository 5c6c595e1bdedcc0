#pragma once

#include <ATen/Context.h>
#include <tessera/base/generator.h>

#include <cstdint>

#include "support/test_device.h"

namespace tessera::testing {

/// The generator of this rank that draws on the `test_device()`.
inline at::Generator test_generator() {
  return tests_on_host() ? default_generator()
                         : at::globalContext().defaultGenerator(test_device());
}

/// As `manual_seed()`; leaves the generators of devices as they are.
inline void seed_test_generator(uint64_t seed) {
  manual_seed(seed);
  test_generator().set_current_seed(seed);
}

}  // namespace tessera::testing
