#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

/// Tells the `CommDebug` scopes of this thread that a collective is issued. Of `subject` it counts
/// what comes before " (": shapes and placements behind are for ranks to compare.
void count_collective(const char* kind, int64_t bytes, std::string_view subject);

}  // namespace tessera
