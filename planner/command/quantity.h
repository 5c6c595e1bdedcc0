#pragma once

#include <cstdint>
#include <string>

namespace tessera::tools {

/// Returns the bytes per second of a bandwidth such as `200Mbit`, `10Gbit`, `1.5GB` or `8Kbit`, per
/// second and with factors of 1000; 0 for `unlimited`. Throws `std::invalid_argument` for others.
double bandwidth_of(const std::string& text);

/// Returns the seconds of a time such as `0.1ms`, `50us`, `2s`, or of a number without a unit.
/// Throws `std::invalid_argument` for others, and for negative ones.
double seconds_of(const std::string& text);

/// Returns the bytes of a size such as `24GB` (1e9 bytes each), `24GiB` (2^30), `512MB`, or of a
/// number without a unit. Throws `std::invalid_argument` for others, for 0 and for more than 1e18.
int64_t bytes_of(const std::string& text);

}  // namespace tessera::tools
