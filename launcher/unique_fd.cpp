#include "launcher/unique_fd.h"

#include <fcntl.h>

#include <cerrno>
#include <system_error>

namespace tessera::tools {

Pipe::Pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "pipe");
  }
  read_end = UniqueFd(ends[0]);
  write_end = UniqueFd(ends[1]);
}

}  // namespace tessera::tools
