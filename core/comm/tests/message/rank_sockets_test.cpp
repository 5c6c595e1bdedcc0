#include "comm/message/rank_sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>

#include "support/forked.h"

namespace tessera::rank_sockets_test {

// A socket that is closed with the object.
struct OwnSocket {
  explicit OwnSocket(int fd) : fd(fd) {}
  ~OwnSocket() { ::close(fd); }
  OwnSocket(const OwnSocket&) = delete;
  OwnSocket& operator=(const OwnSocket&) = delete;

  const int fd;
};

int new_socket(int flags = 0) { return ::socket(AF_INET, SOCK_STREAM | flags, 0); }

int new_listener() {
  const int fd = new_socket();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(::listen(fd, 8), 0);
  return fd;
}

// Whether a connection to the listener is there within a moment.
bool connects(int fd, int listener) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  ::connect(fd, reinterpret_cast<sockaddr*>(&address), size);
  pollfd polled{fd, POLLOUT, 0};
  return ::poll(&polled, 1, 300) == 1 && polled.revents == POLLOUT;
}

bool arrives(int from, int to) {
  char byte = 'x';
  if (::send(from, &byte, 1, MSG_NOSIGNAL) != 1) return false;
  pollfd polled{to, POLLIN, 0};
  return ::poll(&polled, 1, 2000) == 1 && ::recv(to, &byte, 1, 0) == 1;
}

TEST(RankSockets, KnowTheirPorts) {
  const OwnSocket listener(new_listener()), socket(new_socket(SOCK_NONBLOCK));
  ASSERT_TRUE(connects(socket.fd, listener.fd));
  EXPECT_TRUE(is_listening(listener.fd));
  EXPECT_FALSE(is_listening(socket.fd));
  EXPECT_EQ(tcp_ports_of(socket.fd)->peer, tcp_ports_of(listener.fd)->local);
  EXPECT_EQ(tcp_ports_of(listener.fd)->peer, 0);
  EXPECT_FALSE(tcp_ports_of(STDERR_FILENO));
  const auto open = open_descriptors();
  EXPECT_NE(std::ranges::find(open, listener.fd), open.end());
}

TEST(RankSockets, IgnoreNewConnectionsAndKeepTheOldOnes) {
  const OwnSocket listener(new_listener()), early(new_socket(SOCK_NONBLOCK)),
      late(new_socket(SOCK_NONBLOCK));
  ASSERT_TRUE(connects(early.fd, listener.fd));
  const OwnSocket accepted(::accept(listener.fd, nullptr, nullptr));
  ignore_new_connections(listener.fd);
  EXPECT_FALSE(connects(late.fd, listener.fd));
  EXPECT_TRUE(arrives(early.fd, accepted.fd));
  EXPECT_TRUE(arrives(accepted.fd, early.fd));
}

TEST(RankSockets, AreNotInChildren) {
  const OwnSocket listener(new_listener()), socket(new_socket(SOCK_NONBLOCK)), other(new_socket());
  keep_from_children({listener.fd});
  ASSERT_TRUE(connects(socket.fd, listener.fd));
  const OwnSocket accepted(::accept(listener.fd, nullptr, nullptr));  // later
  EXPECT_EQ(status_of_child([&] {
              TORCH_CHECK(!tcp_ports_of(listener.fd) && !tcp_ports_of(accepted.fd));
              TORCH_CHECK(::fcntl(accepted.fd, F_GETFD) >= 0, "the number must stay in use");
              TORCH_CHECK(tcp_ports_of(other.fd) && tcp_ports_of(socket.fd), "not kept");
            }),
            0);
  EXPECT_TRUE(::fcntl(listener.fd, F_GETFD) & FD_CLOEXEC);
  EXPECT_TRUE(arrives(socket.fd, accepted.fd));
}

TEST(RankSockets, LeaveADescriptorAloneThatGotTheNumberOfAClosedOne) {
  int number = -1;
  {
    const OwnSocket listener(new_listener());
    keep_from_children({listener.fd});
    number = listener.fd;
  }
  const OwnSocket other(new_socket());
  ASSERT_EQ(other.fd, number);
  EXPECT_EQ(status_of_child([&] { TORCH_CHECK(tcp_ports_of(other.fd)); }), 0);
}

}  // namespace tessera::rank_sockets_test
