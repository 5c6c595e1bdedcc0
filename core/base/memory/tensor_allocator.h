#pragma once

#include "base/memory/page_heap.h"

namespace tessera {

/// Makes Tessera's allocator the one for CPU tensors. Returns false if the process has set its own.
/// If `use_page_heap()` is not allowed, all memory comes from malloc.
bool serve_tensors();

/// Returns the heap of this process, whose pages the other ranks of the host, `ranks` in all, can
/// map. The first call makes it, for the rest of the process; from then on, tensors that the page
/// heap serves come from it, if `use_page_heap()` was allowed.
///
/// Throws `std::system_error` if the system refuses.
PageHeap& shared_heap(int ranks);

/// Returns the pages of freed tensors to the system: the page heap's and malloc's. Any thread may
/// call this at any time.
void trim_heaps();

}  // namespace tessera
