#pragma once

namespace tessera {

/// Returns the pages of freed tensors to the system: the page heap's and malloc's. Any thread may
/// call this at any time.
void trim_heaps();

}  // namespace tessera
