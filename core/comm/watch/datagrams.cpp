#include "comm/watch/datagrams.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <linux/errqueue.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <system_error>

#include "comm/group/environment.h"
#include "comm/message/rank_sockets.h"

namespace tessera {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList look_up(const std::string& name, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  ::getaddrinfo(name.c_str(), port.c_str(), &hints, &found);
  return {found, &::freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t length, std::string* port = nullptr) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> service{};
  if (::getnameinfo(address, length, host.data(), host.size(), service.data(), service.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "";
  if (port) *port = service.data();
  return host.data();
}

[[noreturn]] void throw_errno(const std::string& action) {
  throw std::system_error(errno, std::generic_category(), action);
}

// The address and port as bytes; the rest of the struct may differ between two of the same.
std::string key_of(const sockaddr_storage& storage) {
  if (storage.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(storage);
    return {reinterpret_cast<const char*>(&in.sin_port), sizeof(in.sin_port) + sizeof(in.sin_addr)};
  }
  const auto& in6 = reinterpret_cast<const sockaddr_in6&>(storage);
  return std::string(reinterpret_cast<const char*>(&in6.sin6_port), sizeof(in6.sin6_port)) +
         std::string(reinterpret_cast<const char*>(&in6.sin6_addr), sizeof(in6.sin6_addr));
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

// Returns the address of an interface; with an empty name, of any that leads to other hosts.
std::string address_of_interface(const std::string& name) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
  for (const ifaddrs* one = all; one; one = one->ifa_next) {
    const bool is_it =
        name.empty() ? (one->ifa_flags & (IFF_UP | IFF_LOOPBACK)) == IFF_UP : name == one->ifa_name;
    if (!is_it || !one->ifa_addr) continue;
    if (one->ifa_addr->sa_family == AF_INET) return numeric(one->ifa_addr, sizeof(sockaddr_in));
    if (one->ifa_addr->sa_family == AF_INET6) return numeric(one->ifa_addr, sizeof(sockaddr_in6));
  }
  return "";
}

// Returns the address from which the kernel would send to `name`; empty if it can't.
std::string source_towards(const std::string& name) {
  const AddressList to = look_up(name, "9", 0);
  for (const addrinfo* one = to.get(); one; one = one->ai_next) {
    const int probe = ::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (probe < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    const bool known = ::connect(probe, one->ai_addr, one->ai_addrlen) == 0 &&
                       ::getsockname(probe, reinterpret_cast<sockaddr*>(&own), &length) == 0;
    ::close(probe);
    if (known) return numeric(reinterpret_cast<const sockaddr*>(&own), length);
  }
  return "";
}

}  // namespace

Datagrams::Address Datagrams::parse(const std::string& address, const std::string& port) {
  const AddressList found = look_up(address, port, AI_NUMERICHOST | AI_NUMERICSERV);
  Address result;
  if (!found) return result;
  std::copy_n(reinterpret_cast<const char*>(found->ai_addr), found->ai_addrlen,
              reinterpret_cast<char*>(&result.storage));
  result.length = found->ai_addrlen;
  return result;
}

Datagrams::Datagrams(const std::string& address) {
  Address own = parse(address, "0");
  TORCH_CHECK_VALUE(own.length > 0, "[init] expected a numeric address, got '", address, "'");
  socket_ = ::socket(own.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_ < 0) throw_errno("could not open a UDP socket");
  const int on = 1;  // the socket then learns that no process has the socket that it sends to
  if (own.storage.ss_family == AF_INET) {
    ::setsockopt(socket_, IPPROTO_IP, IP_RECVERR, &on, sizeof(on));
  } else {
    ::setsockopt(socket_, IPPROTO_IPV6, IPV6_RECVERR, &on, sizeof(on));
  }
  const auto* const to_bind = reinterpret_cast<const sockaddr*>(&own.storage);
  if (::bind(socket_, to_bind, own.length) != 0) {
    const int error = errno;
    ::close(socket_);
    errno = error;
    throw_errno("could not bind a UDP socket to " + address);
  }
  ::getsockname(socket_, reinterpret_cast<sockaddr*>(&own.storage), &own.length);
  std::string port;
  const std::string host =
      numeric(reinterpret_cast<const sockaddr*>(&own.storage), own.length, &port);
  endpoint_ = host + " " + port;
  keep_from_children({socket_});
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

Datagrams::~Datagrams() {
  if (socket_ >= 0) ::close(socket_);
  if (wake_ >= 0) ::close(wake_);
}

void Datagrams::set_endpoints(const std::vector<std::string>& endpoints) {
  for (const std::string& endpoint : endpoints) {
    std::istringstream words(endpoint);
    std::string address, port;
    words >> address >> port;
    peers_.push_back(parse(address, port));
    if (peers_.back().length > 0)
      ranks_[key_of(peers_.back().storage)] = static_cast<int>(peers_.size()) - 1;
  }
}

int Datagrams::rank_at(const sockaddr_storage& storage) const {
  const auto found = ranks_.find(key_of(storage));
  return found == ranks_.end() ? -1 : found->second;
}

void Datagrams::send(int rank, const std::string& text) noexcept {
  const Address& to = peers_[rank];
  if (to.length == 0) return;
  // The first call may return an error of an earlier message, and then sends nothing.
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (::sendto(socket_, text.data(), text.size(), MSG_DONTWAIT,
                 reinterpret_cast<const sockaddr*>(&to.storage), to.length) >= 0)
      return;
  }
}

Datagrams::Events Datagrams::receive(std::chrono::milliseconds longest) {
  std::array<pollfd, 2> entries{pollfd{.fd = socket_, .events = POLLIN, .revents = 0},
                                pollfd{.fd = wake_, .events = POLLIN, .revents = 0}};
  ::poll(entries.data(), entries.size(), static_cast<int>(longest.count()));
  uint64_t count = 0;
  static_cast<void>(!::read(wake_, &count, sizeof(count)));
  Events events;
  std::array<char, kMaxText> buffer;
  // At most so many at once: the caller has other work, too.
  for (int i = 0; i < 256; ++i) {
    const ssize_t length = ::recv(socket_, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (length >= 0) {
      events.texts.emplace_back(buffer.data(), length);
    } else if (errno == EAGAIN) {
      break;
    }
  }
  read_errors(events);
  return events;
}

// Messages that could not be delivered are queued with their destinations.
void Datagrams::read_errors(Events& events) {
  while (true) {
    sockaddr_storage to{};
    std::array<char, 512> control{};
    char byte = 0;
    iovec vector{.iov_base = &byte, .iov_len = 1};
    msghdr message{};
    message.msg_name = &to;
    message.msg_namelen = sizeof(to);
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::recvmsg(socket_, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header;
         header = CMSG_NXTHDR(&message, header)) {
      const auto* const error = reinterpret_cast<const sock_extended_err*>(CMSG_DATA(header));
      if (error->ee_errno == ECONNREFUSED && rank_at(to) >= 0)
        events.refused.push_back(rank_at(to));
    }
  }
}

void Datagrams::wake() noexcept {
  const uint64_t one = 1;
  static_cast<void>(!::write(wake_, &one, sizeof(one)));
}

std::string loopback_address() {
  static const std::string address = [] {
    const int probe = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_in own{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const bool has_ipv4 = ::bind(probe, reinterpret_cast<sockaddr*>(&own), sizeof(own)) == 0;
    if (probe >= 0) ::close(probe);
    return has_ipv4 ? "127.0.0.1" : "::1";
  }();
  return address;
}

std::string address_towards(const std::string& master) {
  if (const auto interface = environment("GLOO_SOCKET_IFNAME")) {
    if (const std::string found = address_of_interface(*interface); !found.empty()) return found;
  }
  if (is_loopback(master)) return master;
  if (master == "localhost") return loopback_address();
  std::array<char, 256> own_name{};
  ::gethostname(own_name.data(), own_name.size() - 1);
  // The last two are nobody's (RFC 5737, RFC 3849); nothing is sent to them.
  for (const std::string& to : {master.empty() ? own_name.data() : master, std::string("192.0.2.1"),
                                std::string("2001:db8::1")}) {
    const std::string found = source_towards(to);
    if (!found.empty() && !is_loopback(found)) return found;
  }
  const std::string found = address_of_interface("");
  return found.empty() ? loopback_address() : found;
}

}  // namespace tessera
