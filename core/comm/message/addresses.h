#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <memory>
#include <string>

namespace tessera {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// Returns what getaddrinfo(3) finds for `name` and `port`, with sockets of `type` and the AI_* of
/// `flags`; null if that is nothing.
AddressList look_up(const std::string& name, const std::string& port, int type, int flags);

/// Returns `address` as a number, and its port in `port`; empty if it is none of the Internet.
std::string numeric_address(const sockaddr* address, socklen_t length, std::string* port = nullptr);

/// Returns whether `address`, a numeric one, is of the loopback interface.
bool is_loopback(const std::string& address);

/// Returns 127.0.0.1, or ::1 on a host without IPv4.
std::string loopback_address();

/// Returns `loopback_address()` for "localhost", so that all ranks mean the same address by it;
/// else `name` itself.
std::string numeric_loopback(const std::string& name);

/// Returns a numeric address of this host, under which `master` (a name or an address, or empty)
/// and the hosts near it reach it: that of the interface GLOO_SOCKET_IFNAME, else the one from
/// which this host reaches `master`. If that is a name of this host itself, which Debian gives the
/// address 127.0.1.1, or is not known: the one towards hosts far away, else that of any interface,
/// else `loopback_address()`.
std::string address_towards(const std::string& master);

}  // namespace tessera
