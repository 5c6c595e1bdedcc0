#include "comm/message/addresses.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <string>

#include "comm/group/environment.h"

namespace tessera {
namespace {

// Returns the address of an interface; with an empty name, of any that leads to other hosts.
std::string address_of_interface(const std::string& name) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
  for (const ifaddrs* one = all; one; one = one->ifa_next) {
    const bool is_it =
        name.empty() ? (one->ifa_flags & (IFF_UP | IFF_LOOPBACK)) == IFF_UP : name == one->ifa_name;
    if (!is_it || !one->ifa_addr) continue;
    if (one->ifa_addr->sa_family == AF_INET)
      return numeric_address(one->ifa_addr, sizeof(sockaddr_in));
    if (one->ifa_addr->sa_family == AF_INET6)
      return numeric_address(one->ifa_addr, sizeof(sockaddr_in6));
  }
  return "";
}

// Returns the address from which the kernel would send to `name`; empty if it can't.
std::string source_towards(const std::string& name) {
  const AddressList to = look_up(name, "9", SOCK_DGRAM, 0);
  for (const addrinfo* one = to.get(); one; one = one->ai_next) {
    const int probe = ::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (probe < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    const bool known = ::connect(probe, one->ai_addr, one->ai_addrlen) == 0 &&
                       ::getsockname(probe, reinterpret_cast<sockaddr*>(&own), &length) == 0;
    ::close(probe);
    if (known) return numeric_address(reinterpret_cast<const sockaddr*>(&own), length);
  }
  return "";
}

}  // namespace

AddressList look_up(const std::string& name, const std::string& port, int type, int flags) {
  addrinfo hints{};
  hints.ai_socktype = type;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  ::getaddrinfo(name.c_str(), port.c_str(), &hints, &found);
  return {found, &::freeaddrinfo};
}

std::string numeric_address(const sockaddr* address, socklen_t length, std::string* port) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> service{};
  if (::getnameinfo(address, length, host.data(), host.size(), service.data(), service.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "";
  if (port) *port = service.data();
  return host.data();
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
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

std::string numeric_loopback(const std::string& name) {
  return name == "localhost" ? loopback_address() : name;
}

std::string address_towards(const std::string& master) {
  if (const auto interface = environment("GLOO_SOCKET_IFNAME")) {
    if (const std::string found = address_of_interface(*interface); !found.empty()) return found;
  }
  if (const std::string number = numeric_loopback(master); is_loopback(number)) return number;
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
