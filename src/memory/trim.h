#pragma once

namespace tessera {

/// Gives the pages of freed tensors back to the system: the page heap's and malloc's.
/// Any thread may call this at any time.
void trim_heaps();

}  // namespace tessera
