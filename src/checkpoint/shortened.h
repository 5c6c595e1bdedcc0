#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// Returns the beginning of an untrusted text, for a message.
inline std::string shortened(std::string_view text, size_t most = 100) {
  return text.size() <= most ? std::string(text) : std::string(text.substr(0, most)) + "...";
}

}  // namespace tessera
