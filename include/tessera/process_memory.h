#pragma once

#include <tessera/export.h>

#include <cstdint>

namespace tessera {

/// Bytes of memory of this process, pages that it shares with others counted in equal parts (PSS).
/// The system walks all pages for it: not for inner loops. Throws `c10::Error` where the system has
/// no /proc/self/smaps_rollup.
TESSERA_API int64_t pss_bytes();

}  // namespace tessera
