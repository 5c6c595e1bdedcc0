#pragma once

#include <tessera/export.h>

#include <cstdint>

namespace tessera {

/// Returns the bytes of memory of this process, in which pages that it shares with others count in
/// equal parts (PSS). Slow, as the system walks all pages: not for inner loops. Throws `c10::Error`
/// if the system has no /proc/self/smaps_rollup.
TESSERA_API int64_t pss_bytes();

}  // namespace tessera
