#pragma once

#include <cstddef>

namespace tessera {

/// Returns false if the environment has `TESSERA_HUGE_PAGES=0`.
bool may_use_huge_pages();

/// Asks the kernel to back [begin, begin + nbytes) with pages of 2 MiB, where it can and if they
/// are allowed. Matrix kernels and optimizers then spend less time on address translation.
void ask_for_huge_pages(void* begin, size_t nbytes);

}  // namespace tessera
