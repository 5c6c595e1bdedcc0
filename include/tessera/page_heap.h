#pragma once

#include <tessera/export.h>

namespace tessera {

/// Lets LibTorch take CPU tensors of 128 KiB and more from a heap of pages, for the rest of the
/// process: what is freed joins its free neighbours, keeps its pages and is used again for the next
/// tensor that fits. So a training step faults in no pages, and needs less memory than on malloc's
/// heap, which falls into pieces. Smaller tensors, and those that exist, stay where they are.
///
/// `fully_shard()` calls it; call it first in `main()` to have the model made there, too. Not
/// collective; further calls do nothing.
///
/// Returns false, and changes nothing, if the process has set a CPU allocator of its own, if the
/// environment has `TESSERA_PAGE_HEAP=0`, or under the address sanitizer, which needs malloc to see
/// overflows.
TESSERA_API bool use_page_heap();

}  // namespace tessera
