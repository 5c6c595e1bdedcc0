#pragma once

namespace tessera {

/// Makes Tessera's allocator the one for CPU tensors. Returns false if the process has set its own.
/// If `use_page_heap()` is not allowed, all memory comes from malloc.
bool serve_tensors();

}  // namespace tessera
