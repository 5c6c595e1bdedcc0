#include "launcher/job_token.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <cerrno>
#include <system_error>

namespace tessera::tools {

std::string random_job_token() {
  unsigned char bytes[16];
  if (::getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

std::string job_token(const std::string& job, int attempt) {
  return attempt == 0 ? job : fmt::format("{}.{}", job, attempt);
}

}  // namespace tessera::tools
