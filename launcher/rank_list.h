#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// Returns "rank 3" or "ranks 0-2, 5" for ascending ranks.
std::string rank_list(const std::vector<int>& ranks);

/// Returns one line of at most `width` characters: control characters become blanks, and the end of
/// a longer text is replaced by "...".
std::string one_line(std::string_view text, size_t width);

/// Returns the number of characters of UTF-8 text.
size_t text_width(std::string_view text);

}  // namespace tessera::tools
