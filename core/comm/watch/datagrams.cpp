#include "comm/watch/datagrams.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <linux/errqueue.h>
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

#include "comm/message/addresses.h"
#include "comm/message/rank_sockets.h"

namespace tessera {
namespace {

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

}  // namespace

Datagrams::Address Datagrams::parse(const std::string& address, const std::string& port) {
  const AddressList found = look_up(address, port, SOCK_DGRAM, AI_NUMERICHOST | AI_NUMERICSERV);
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
      numeric_address(reinterpret_cast<const sockaddr*>(&own.storage), own.length, &port);
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

}  // namespace tessera
