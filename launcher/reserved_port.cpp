#include "launcher/reserved_port.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

namespace tessera::tools {

// The socket stays bound and never listens. As it has SO_REUSEADDR, like c10d's TCPStore, rank 0
// can bind and listen on the same port, while the kernel gives it to no program that asks for a
// free one.
ReservedPort::ReservedPort(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  socklen_t size = sizeof(address);
  const int reuse = 1;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!socket_.is_open() ||
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse)) != 0 ||
      ::bind(socket_.get(), generic, size) != 0 ||
      ::getsockname(socket_.get(), generic, &size) != 0) {
    throw std::system_error(errno, std::generic_category(),
                            port == 0 ? "no free port on 127.0.0.1"
                                      : fmt::format("cannot use port {} on 127.0.0.1", port));
  }
  number_ = ntohs(address.sin_port);
}

}  // namespace tessera::tools
