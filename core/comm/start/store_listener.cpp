#include "comm/start/store_listener.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <string>

#include "comm/message/addresses.h"

namespace tessera {
namespace {

// Returns the listening socket, or -1 with errno.
int listen_at(const addrinfo& address) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ai_family == AF_INET6)  // `::` takes IPv4, too
    ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (::bind(fd, address.ai_addr, address.ai_addrlen) == 0 && ::listen(fd, SOMAXCONN) == 0)
    return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

// Listens at the first address of `name` for which `may_use` holds, and that this host has. Returns
// -1 with errno: 0 if there is none.
int listen_at(const std::string& name, int port,
              const std::function<bool(const addrinfo&)>& may_use) {
  const AddressList found = look_up(name, std::to_string(port), SOCK_STREAM, AI_NUMERICSERV);
  errno = 0;
  for (const addrinfo* one = found.get(); one; one = one->ai_next) {
    if (!may_use(*one)) continue;
    const int fd = listen_at(*one);
    if (fd >= 0 || errno == EADDRINUSE) return fd;
  }
  return -1;
}

}  // namespace

int open_store_listener(const RankInfo& info) {
  const std::string address = numeric_loopback(info.master_addr);
  const int port = info.master_port;
  const bool is_local = info.local_size == info.size;
  in6_addr number{};
  const bool is_number = ::inet_pton(AF_INET, address.c_str(), &number) == 1 ||
                         ::inet_pton(AF_INET6, address.c_str(), &number) == 1;
  // Other hosts may know another address under a name that is a loopback address here.
  int fd = listen_at(address, port, [&](const auto& at) {
    return is_number || is_local || !is_loopback(numeric_address(at.ai_addr, at.ai_addrlen));
  });
  // They may reach this one through an address that it does not have itself.
  for (const char* const all : {"::", "0.0.0.0"}) {
    if (fd < 0 && errno != EADDRINUSE) fd = listen_at(all, port, [](const auto&) { return true; });
  }
  if (fd >= 0) return fd;
  if (errno == EADDRINUSE) {
    C10_THROW_ERROR(
        DistNetworkError,
        fmt::format("[init] rank {} of {} must serve the rendezvous at {}:{} "
                    "(MASTER_ADDR:MASTER_PORT); expected a free port, got port {}, on which "
                    "another process of this host listens: another job or service. Give this job "
                    "another MASTER_PORT, or end that process (`ss -ltnp` lists it)",
                    info.rank, info.size, info.master_addr, port, port));
  }
  C10_THROW_ERROR(
      DistNetworkError,
      fmt::format("[init] rank {} of {} can't listen at {}:{} (MASTER_ADDR:MASTER_PORT): {}",
                  info.rank, info.size, info.master_addr, port, std::strerror(errno)));
}

}  // namespace tessera
