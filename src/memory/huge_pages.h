#pragma once

#include <cstddef>

namespace tessera {

/// False if the environment has `TESSERA_HUGE_PAGES=0`.
bool may_use_huge_pages();

/// Asks the kernel to back [begin, begin + nbytes) with pages of 2 MiB, where it can and if they
/// may be used. Matrix kernels and optimizers then spend less time on finding pages.
void ask_for_huge_pages(void* begin, size_t nbytes);

}  // namespace tessera
