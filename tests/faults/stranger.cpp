#include "stranger.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

// Returns false once the connection is over.
bool answer(int connection, bool is_web_server) {
  std::array<char, 4096> request;
  if (::recv(connection, request.data(), request.size(), MSG_DONTWAIT) <= 0) return false;
  if (!is_web_server) return true;
  constexpr std::string_view text = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
  [[maybe_unused]] const auto sent = ::send(connection, text.data(), text.size(), MSG_NOSIGNAL);
  return false;
}

}  // namespace

Stranger::Stranger(bool is_web_server) : is_web_server_(is_web_server) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener_, generic, size) != 0 || ::listen(listener_, 64) != 0 ||
      ::getsockname(listener_, generic, &size) != 0)
    throw std::runtime_error("cannot listen on a port");
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { serve(); });
}

Stranger::~Stranger() {
  ends_ = true;
  thread_.join();
  ::close(listener_);
}

void Stranger::serve() {
  std::vector<pollfd> polled = {{listener_, POLLIN, 0}};
  while (!ends_) {
    ::poll(polled.data(), polled.size(), 20);
    for (size_t i = polled.size() - 1; i > 0; --i) {
      if (polled[i].revents == 0 || answer(polled[i].fd, is_web_server_)) continue;
      ::close(polled[i].fd);
      polled.erase(polled.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (polled[0].revents == 0) continue;
    const int connection = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection >= 0) polled.push_back({connection, POLLIN, 0});
  }
  for (size_t i = 1; i < polled.size(); ++i) ::close(polled[i].fd);
}

}  // namespace tessera
