#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Returns the HMAC-SHA256 (RFC 2104) of `text`: 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view text);

/// Returns a key for `purpose` alone, made of `secret`; empty if that is.
std::string derived_key(std::string_view secret, std::string_view purpose);

/// Returns `text` behind the HMAC of it and `context`, by which a holder of `key` knows that it is
/// unchanged and meant for this place. With an empty key: `text` alone.
std::string authenticated(std::string_view key, std::string_view context, std::string_view text);
/// Returns the text of `authenticated()`; nothing if it was made with another key or context.
std::optional<std::string> authentic_text(std::string_view key, std::string_view context,
                                          std::string_view bytes);

}  // namespace tessera
