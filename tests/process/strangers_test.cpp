// Programs that are no ranks of a job, at its ports; and what keeps them out.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ranks_by_hand.h"

namespace tessera::strangers_test {

int descriptors_of(pid_t pid) {
  const std::filesystem::directory_iterator all("/proc/" + std::to_string(pid) + "/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

// Opens 400 connections to a port of 127.0.0.1, sends garbage through every second one, and closes
// them. Returns how many were accepted.
int visit_as_stranger(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  std::vector<int> sockets;
  int accepted = 0;
  for (int i = 0; i < 400; ++i) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    pollfd polled{fd, POLLOUT, 0};
    if (::poll(&polled, 1, accepted == 0 && i > 3 ? 0 : 100) == 1 && polled.revents == POLLOUT)
      ++accepted;
    if (i % 2 == 0)
      ::send(fd, &fd, sizeof(fd), MSG_NOSIGNAL), ::send(fd, "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL);
    sockets.push_back(fd);
  }
  for (const int fd : sockets) ::close(fd);
  return accepted;
}

std::set<std::string> lines_after(const std::string& text, const std::string& key) {
  std::set<std::string> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(key)) found.insert(line.substr(key.size()));
  return found;
}

TEST(Strangers, LeaveNoDescriptorsAndReachNoRank) {
  const TemporaryDirectory directory;
  const Command linger = {"--linger", directory.path("go on")};
  RanksByHand ranks(2, {{"TESSERA_TIMEOUT", "30"}, {"TESSERA_TRANSPORT", "gloo"}});
  auto& first = ranks.start(0, {}, linger);
  auto& second = ranks.start(1, {}, linger);
  ASSERT_TRUE(first.wait_for_output("lingers") && second.wait_for_output("lingers"));
  const int before = descriptors_of(first.pid());
  const auto listening = lines_after(first.output(), "listening ");
  EXPECT_EQ(listening.size(), 2);
  for (const std::string& address : listening) {
    EXPECT_TRUE(address.starts_with("127.0.0.1:")) << address << " is open to other hosts";
    const int port = std::stoi(address.substr(address.find(':') + 1));
    const int accepted = visit_as_stranger(port);
    EXPECT_EQ(accepted, 0) << (port == ranks.port() ? "the store" : "Gloo") << " is not deaf";
  }
  for (int i = 0; i < 100 && descriptors_of(first.pid()) > before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LE(descriptors_of(first.pid()), before + 8);
  std::ofstream(directory.path("go on")) << "";
  for (const ProgramEnd& end : ranks.wait()) {
    EXPECT_EQ(end.status, 0) << end.err;
    EXPECT_TRUE(contains(end.out, "again 3")) << end.out;
  }
}

// Connects to a store, asks it for the number of its keys twice, and leaves before it can answer.
// Returns false if it is not there.
bool ask_and_leave(int port) {
  const std::string check("\0\xCE\xF7\x85\x3C", 5), count_keys(2, '\x07');  // c10d's requests
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const std::string text = check + count_keys;
  const bool is_there =
      ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      ::send(fd, text.data(), text.size(), MSG_NOSIGNAL) == std::ssize(text);
  ::close(fd);
  return is_there;
}

TEST(Strangers, AVisitorThatLeavesBeforeItsAnswersEndsNobody) {
  RanksByHand ranks(2, {{"TESSERA_TIMEOUT", "60"}});
  auto& first = ranks.start(0);
  for (int i = 0; i < 600 && !ask_and_leave(ranks.port()); ++i) ::usleep(50'000);
  for (int i = 0; i < 20; ++i) {
    first.signal(SIGSTOP);  // so that it answers after the visitor has left
    EXPECT_TRUE(ask_and_leave(ranks.port()));
    first.signal(SIGCONT);
    ::usleep(20'000);
  }
  ranks.start(1);
  for (const ProgramEnd& end : ranks.wait()) EXPECT_EQ(end.status, 0) << end.err;
}

TEST(Strangers, ABrokenPipeEndsNoRank) {
  const TemporaryDirectory directory;
  const Command linger = {"--linger", directory.path("go on")};
  RanksByHand ranks(2, {{"TESSERA_TIMEOUT", "30"}});
  auto& first = ranks.start(0, {}, linger);
  ranks.start(1, {}, linger);
  ASSERT_TRUE(first.wait_for_output("lingers"));
  first.signal(SIGPIPE);
  ::usleep(50'000);
  std::ofstream(directory.path("go on")) << "";
  for (const ProgramEnd& end : ranks.wait()) EXPECT_EQ(end.status, 0) << end.err;
}

TEST(Strangers, RanksHaveOneSecretOrNone) {
  RanksByHand some(2, {{"TESSERA_TIMEOUT", "5"}});
  some.start(0, {{"TESSERA_SECRET", "blue"}}), some.start(1);
  EXPECT_TRUE(contains(some.wait()[1].err, "rank 0 has TESSERA_SECRET, and this rank has none"));
  RanksByHand other(2, {{"TESSERA_TIMEOUT", "5"}});
  other.start(0, {{"TESSERA_SECRET", "blue"}}), other.start(1, {{"TESSERA_SECRET", "red"}});
  for (const ProgramEnd& end : other.wait()) {
    EXPECT_EQ(end.status, 1);
    EXPECT_TRUE(contains(end.err, "in the store is not this job's, and is dropped")) << end.err;
    EXPECT_TRUE(contains(end.err, " in vain for rank ")) << end.err;
  }
}

}  // namespace tessera::strangers_test
