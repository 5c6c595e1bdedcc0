#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

/// Stored bytes are checked in blocks of this size, so that a part can be read and checked.
constexpr int64_t kChecksumBlock = int64_t{1} << 20;

/// XXH3, 64 bits.
uint64_t checksum(const void* data, size_t nbytes);

/// 16 hexadecimal digits, and back. Throws `c10::ValueError` for other text.
std::string checksum_text(uint64_t checksum);
uint64_t checksum_from_text(const std::string& text);

}  // namespace tessera
