#pragma once

namespace tessera {

/// Makes Tessera's allocator the one for CPU tensors, unless the process has set its own: then
/// false. Where `use_page_heap()` is not allowed, it takes all memory from malloc.
bool serve_tensors();

}  // namespace tessera
