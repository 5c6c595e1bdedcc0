#pragma once

namespace tessera::testing::sim {

/// Makes the backend known to LibTorch, once. Not done at the start of the program: tests of other
/// things, which are linked with this backend, shall find no accelerator.
void register_backend();

}  // namespace tessera::testing::sim
