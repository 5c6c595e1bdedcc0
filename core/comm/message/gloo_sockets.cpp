#include "comm/message/gloo_sockets.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "comm/message/rank_sockets.h"

namespace tessera {
namespace {

bool links_to(int descriptor, const std::string& target) {
  std::error_code error;
  const auto link =
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor), error);
  return !error && link.string().starts_with(target);
}

// Returns the descriptors that an epoll descriptor polls.
std::vector<int> polled_by(int poller) {
  std::vector<int> found;
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(poller));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int fd = 0;
    if (words >> name >> fd && name == "tfd:") found.push_back(fd);
  }
  return found;
}

// A new device polls a pipe, by which its thread is woken, and its listening socket.
bool polls_new_device(int descriptor) {
  if (!links_to(descriptor, "anon_inode:[eventpoll]")) return false;
  const std::vector<int> polled = polled_by(descriptor);
  return polled.size() == 2 && std::ranges::count_if(polled, is_listening) == 1 &&
         std::ranges::any_of(polled, [](int fd) { return links_to(fd, "pipe:"); });
}

}  // namespace

GlooSockets::GlooSockets(const std::function<void()>& make_device) {
  static std::mutex making;  // ranks may be threads
  const std::lock_guard lock(making);
  const std::vector<int> before = open_descriptors();
  make_device();
  for (const int fd : open_descriptors()) {
    if (std::ranges::find(before, fd) == before.end() && polls_new_device(fd)) poller_ = fd;
  }
}

void GlooSockets::close_to_others() const {
  if (poller_ < 0) return;
  std::vector<int> sockets;
  for (const int fd : polled_by(poller_)) {
    if (!tcp_ports_of(fd)) continue;
    if (is_listening(fd)) ignore_new_connections(fd);
    sockets.push_back(fd);
  }
  keep_from_children(sockets);
}

}  // namespace tessera
