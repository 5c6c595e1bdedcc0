#pragma once

#include <string_view>

namespace tessera {

/// Returns true for the error of a wait that failed because ranks issued their collectives in
/// different orders.
bool tells_differing_order(std::string_view error);

}  // namespace tessera
