#include "comm/group/authentication.h"

#include <c10/util/Exception.h>
extern "C" {  // the first one of Mbed TLS 2 does not say so
#include <mbedtls/constant_time.h>
#include <mbedtls/md.h>
}

#include <cstdint>

namespace tessera {
namespace {

constexpr size_t kBytes = 32;

std::string code_of(std::string_view key, std::string_view context, std::string_view text) {
  // The length keeps ("ab", "c") apart from ("a", "bc").
  std::string whole = std::to_string(context.size()) + ' ';
  return hmac_sha256(key, whole.append(context).append(text));
}

}  // namespace

std::string hmac_sha256(std::string_view key, std::string_view text) {
  const auto bytes = [](std::string_view of) {
    return reinterpret_cast<const unsigned char*>(of.data());
  };
  std::string code(kBytes, '\0');
  const int error =
      mbedtls_md_hmac(mbedtls_md_info_from_type(MBEDTLS_MD_SHA256), bytes(key), key.size(),
                      bytes(text), text.size(), reinterpret_cast<unsigned char*>(code.data()));
  TORCH_INTERNAL_ASSERT(error == 0, "HMAC-SHA256 failed: ", error);
  return code;
}

std::string derived_key(std::string_view secret, std::string_view purpose) {
  return secret.empty() ? "" : hmac_sha256(secret, purpose);
}

std::string authenticated(std::string_view key, std::string_view context, std::string_view text) {
  std::string result = key.empty() ? "" : code_of(key, context, text);
  return result.append(text);
}

std::optional<std::string> authentic_text(std::string_view key, std::string_view context,
                                          std::string_view bytes) {
  if (key.empty()) return std::string(bytes);
  if (bytes.size() < kBytes) return std::nullopt;
  const std::string_view text = bytes.substr(kBytes);
  const std::string expected = code_of(key, context, text);
  if (mbedtls_ct_memcmp(expected.data(), bytes.data(), kBytes) != 0) return std::nullopt;
  return std::string(text);
}

}  // namespace tessera
