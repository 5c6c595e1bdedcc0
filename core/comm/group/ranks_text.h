#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

namespace tessera {

/// Returns "rank 1" or "ranks 0, 2", of which it lists at most `longest` ("ranks 0, 2 and 5 more").
template <class Ranks>
std::string ranks_text(const Ranks& ranks, size_t longest = 1024) {
  const size_t listed = std::min(ranks.size(), longest);
  const auto end = ranks.begin() + static_cast<ptrdiff_t>(listed);
  const std::string more =
      listed < ranks.size() ? fmt::format(" and {} more", ranks.size() - listed) : "";
  return fmt::format("{} {}{}", ranks.size() == 1 ? "rank" : "ranks",
                     fmt::join(ranks.begin(), end, ", "), more);
}

}  // namespace tessera
