#pragma once

#include <sys/socket.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Exchanges short texts between the ranks of a world, by UDP: a rank that has stopped or ended
/// can't hold up another, and nothing has to be connected. Texts may get lost. Any thread may send;
/// one thread receives.
class Datagrams {
 public:
  static constexpr size_t kMaxText = 8192;

  /// Opens a socket at a free port of `address`, a numeric IP address. Throws `std::system_error`.
  explicit Datagrams(const std::string& address);
  ~Datagrams();
  Datagrams(const Datagrams&) = delete;
  Datagrams& operator=(const Datagrams&) = delete;

  /// Returns "ADDRESS PORT", under which other ranks reach this one.
  const std::string& endpoint() const { return endpoint_; }
  /// Sets the endpoints of all ranks, by rank; words after the port are ignored. Must be called
  /// once, before the first message.
  void set_endpoints(const std::vector<std::string>& endpoints);

  /// Never waits, and never throws.
  void send(int rank, const std::string& text) noexcept;

  struct Events {
    std::vector<std::string> texts;
    std::vector<int> refused;  ///< ranks whose host says that no process has their socket
  };
  /// Waits up to `longest` for texts, or until `wake()` is called.
  Events receive(std::chrono::milliseconds longest);
  void wake() noexcept;

 private:
  struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;
  };
  static Address parse(const std::string& address, const std::string& port);
  int rank_at(const sockaddr_storage& storage) const;
  void read_errors(Events& events);

  int socket_ = -1;
  int wake_ = -1;  // an eventfd
  std::string endpoint_;
  std::vector<Address> peers_;        // by rank
  std::map<std::string, int> ranks_;  // by address and port, as bytes
};

}  // namespace tessera
