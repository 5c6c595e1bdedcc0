#include "comm/start/store_listener.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace tessera {
namespace {

struct ListenerAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

ListenerAddress ipv4(in_addr address, int port) {
  ListenerAddress result{.size = sizeof(sockaddr_in)};
  auto* const target = reinterpret_cast<sockaddr_in*>(&result.bytes);
  target->sin_family = AF_INET;
  target->sin_addr = address;
  target->sin_port = htons(static_cast<uint16_t>(port));
  return result;
}

ListenerAddress ipv6(const in6_addr& address, int port) {
  ListenerAddress result{.size = sizeof(sockaddr_in6)};
  auto* const target = reinterpret_cast<sockaddr_in6*>(&result.bytes);
  target->sin6_family = AF_INET6;
  target->sin6_addr = address;
  target->sin6_port = htons(static_cast<uint16_t>(port));
  return result;
}

// Returns the listening socket, or -1 with errno.
int listen_at(const ListenerAddress& address) {
  const int fd = ::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.bytes.ss_family == AF_INET6)  // `::` takes IPv4, too
    ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address.bytes), address.size) == 0 &&
      ::listen(fd, SOMAXCONN) == 0)
    return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

}  // namespace

std::string numeric_loopback(const std::string& master_addr) {
  return master_addr == "localhost" ? "127.0.0.1" : master_addr;
}

int open_store_listener(const RankInfo& info) {
  const std::string address = numeric_loopback(info.master_addr);
  const int port = info.master_port;
  in_addr numbers{};
  int fd = -1;
  if (::inet_pton(AF_INET, address.c_str(), &numbers) == 1 &&
      ntohl(numbers.s_addr) >> 24 == IN_LOOPBACKNET) {
    fd = listen_at(ipv4(numbers, port));
  } else if (address == "::1") {
    fd = listen_at(ipv6(in6addr_loopback, port));
  } else {
    fd = listen_at(ipv6(in6addr_any, port));
    if (fd < 0 && errno != EADDRINUSE) fd = listen_at(ipv4({.s_addr = INADDR_ANY}, port));
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
