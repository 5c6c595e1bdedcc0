#include "checkpoint/checksum.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera {

uint64_t checksum(const void* data, size_t nbytes) { return XXH3_64bits(data, nbytes); }

std::string checksum_text(uint64_t checksum) { return fmt::format("{:016x}", checksum); }

uint64_t checksum_from_text(const std::string& text) {
  TORCH_CHECK_VALUE(
      text.size() == 16 &&
          std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isxdigit(c); }),
      "[checkpoint] a checksum must be 16 hexadecimal digits; got '", text, "'");
  return std::stoull(text, nullptr, 16);
}

}  // namespace tessera
