#pragma once

#include "memory/page_heap.h"

namespace tessera {

/// Returns the heap of this process, whose pages the other ranks of the host, `ranks` in all, can
/// map. The first call makes it, for the rest of the process; from then on, tensors that the page
/// heap serves come from it, if `use_page_heap()` was allowed.
///
/// Throws `std::system_error` if the system refuses.
PageHeap& shared_heap(int ranks);

}  // namespace tessera
