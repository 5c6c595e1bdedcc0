#pragma once

#include <tessera/export.h>

namespace tessera {

/// Makes LibTorch allocate CPU tensors of 128 KiB and more on a heap of pages, for the rest of the
/// process: a freed block is merged with its free neighbours, keeps its pages and is reused for the
/// next tensor that fits. So a training step has no page faults, and needs less memory than on
/// malloc's heap: that fragments. Smaller tensors, and those that exist already, are not affected.
///
/// `fully_shard()` calls it; call it first in `main()` to have the model allocated there, too. Not
/// collective; further calls do nothing.
///
/// Returns false, and changes nothing, if the process has set a CPU allocator of its own, if the
/// environment has `TESSERA_PAGE_HEAP=0`, or under the address sanitizer: it needs malloc to detect
/// overflows.
TESSERA_API bool use_page_heap();

}  // namespace tessera
