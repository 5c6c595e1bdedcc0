#include "comm/message/rank_sockets.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <mutex>
#include <string>
#include <system_error>

namespace tessera {
namespace {

int option_of(int descriptor, int option) {
  int value = 0;
  socklen_t size = sizeof(value);
  return ::getsockopt(descriptor, SOL_SOCKET, option, &value, &size) == 0 ? value : -1;
}

template <typename Query>
std::optional<int> port_from(Query query, int descriptor) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (query(descriptor, reinterpret_cast<sockaddr*>(&address), &size) != 0) return std::nullopt;
  if (address.ss_family == AF_INET)
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  if (address.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  return std::nullopt;
}

// The sockets that children must not have, with what is to be done at a fork.
class KeptSockets {
 public:
  static KeptSockets& of_process() {
    static auto* const kept =
        new KeptSockets;  // never destroyed: a process may fork while it exits
    return *kept;
  }

  void add(const std::vector<int>& sockets) {
    const std::lock_guard lock(mutex_);
    forget_closed();
    for (const int fd : sockets)
      if (const auto inode = inode_of(fd)) sockets_.push_back({fd, *inode});
  }

 private:
  // A number is used again after a close, an inode is not.
  struct Socket {
    int fd;
    ino_t inode;
  };

  KeptSockets() {
    ::pthread_atfork([] { of_process().before_fork(); },
                     [] { of_process().after_fork_in_parent(); },
                     [] { of_process().after_fork_in_child(); });
  }

  static std::optional<ino_t> inode_of(int fd) {
    struct stat status {};
    if (::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return std::nullopt;
    return status.st_ino;
  }

  void forget_closed() {
    std::erase_if(sockets_,
                  [](const Socket& socket) { return inode_of(socket.fd) != socket.inode; });
  }

  void before_fork() {
    mutex_.lock();
    forget_closed();
    to_replace_.clear();
    std::vector<int> listening;  // ports
    for (const Socket& socket : sockets_) {
      to_replace_.push_back(socket.fd);
      // Another thread may close it meanwhile.
      const auto ports = tcp_ports_of(socket.fd);
      if (ports && is_listening(socket.fd)) listening.push_back(ports->local);
    }
    if (listening.empty()) return;
    for (const int fd : open_descriptors()) {
      const auto ports = tcp_ports_of(fd);
      if (ports && std::ranges::find(listening, ports->local) != listening.end())
        to_replace_.push_back(fd);
    }
  }

  void after_fork_in_parent() { mutex_.unlock(); }

  // Replaces instead of closing: objects that the child has inherited use and close these numbers.
  void after_fork_in_child() {
    const int null = to_replace_.empty() ? -1 : ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : to_replace_) null < 0 ? ::close(fd) : ::dup3(null, fd, O_CLOEXEC);
    if (null >= 0) ::close(null);
    sockets_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<Socket> sockets_;
  std::vector<int> to_replace_;
};

}  // namespace

std::vector<int> open_descriptors() {
  std::vector<int> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    int fd = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), fd).ec == std::errc())
      found.push_back(fd);
  }
  return found;
}

std::optional<TcpPorts> tcp_ports_of(int descriptor) {
  if (option_of(descriptor, SO_TYPE) != SOCK_STREAM) return std::nullopt;
  const auto local = port_from(::getsockname, descriptor);
  if (!local) return std::nullopt;
  return TcpPorts{*local, port_from(::getpeername, descriptor).value_or(0)};
}

bool is_listening(int descriptor) { return option_of(descriptor, SO_ACCEPTCONN) == 1; }

void keep_from_children(const std::vector<int>& sockets) {
  for (const int fd : sockets) {
    const int flags = ::fcntl(fd, F_GETFD);
    if (flags >= 0) ::fcntl(fd, F_SETFD, flags | FD_CLOEXEC);
  }
  KeptSockets::of_process().add(sockets);
}

void ignore_new_connections(int listener) {
  // The filter sees the packets that open a connection and lets none of them through. It is without
  // effect on sockets that were accepted before.
  sock_filter drop_all = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{.len = 1, .filter = &drop_all};
  ::setsockopt(listener, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program));
}

}  // namespace tessera
