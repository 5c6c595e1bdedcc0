#pragma once

#include "memory/page_heap.h"

namespace tessera {

/// The heap of this process whose pages the other `ranks` of the host have mapped. Made by the
/// first call, for the rest of the process; from then on tensors that the page heap serves come
/// from it, where `use_page_heap()` was allowed.
///
/// Throws `std::system_error` where the system refuses.
PageHeap& shared_heap(int ranks);

}  // namespace tessera
