#pragma once

#include <string_view>

namespace tessera {

/// Returns true if a name fits a pattern, in which `*` stands for any characters.
bool fits_pattern(std::string_view pattern, std::string_view name);

}  // namespace tessera
