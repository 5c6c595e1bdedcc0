#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

/// Stored bytes have a checksum per block of this size, so that a part can be read and verified.
constexpr int64_t kChecksumBlock = int64_t{1} << 20;

/// Returns the XXH3 hash of 64 bits.
uint64_t checksum(const void* data, size_t nbytes);

/// Converts to 16 hexadecimal digits, and back. Throws `c10::ValueError` for other text.
std::string checksum_text(uint64_t checksum);
uint64_t checksum_from_text(const std::string& text);

}  // namespace tessera
