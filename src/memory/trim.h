#pragma once

namespace tessera {

/// Gives the pages of freed tensors back to the system: the page heap's and malloc's.
void trim_heaps();

}  // namespace tessera
