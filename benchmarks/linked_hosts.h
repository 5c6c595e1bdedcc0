#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::tools {

/// Hosts in one network, whose links have a limited bandwidth: network namespaces of this machine,
/// joined by a bridge, with token buckets (`tc tbf`) at both ends of each link.
///
/// Their processes share cores, memory and files with all others; only what they send to each other
/// is as between machines.
class LinkedHosts {
 public:
  /// `mbit`: of each link and direction, in 10^6 bits per second; 0: no limit. `congestion`: the
  /// hosts' congestion control of TCP, one that the kernel allows; empty: this machine's. First
  /// removes hosts that killed processes have left. Throws `std::invalid_argument`, and
  /// `std::runtime_error` with the words of `ip` or `tc` where this process may not make them: it
  /// needs root, and iproute2.
  LinkedHosts(int hosts, double mbit, const std::string& congestion = "");
  ~LinkedHosts();
  LinkedHosts(const LinkedHosts&) = delete;
  LinkedHosts& operator=(const LinkedHosts&) = delete;

  /// True if this process can make hosts without a limit. Tries it the first time.
  static bool can_be_made();

  /// Returns words to put before a command that is to run on a host.
  std::vector<std::string> on_host(int host) const;
  std::string address(int host) const;
  /// Linux's own default. A machine's may be another one, and decides how connections share a link.
  static constexpr const char* kCongestion = "cubic";
  /// The name of each host's link, on the host.
  static constexpr const char* kInterface = "uplink0";

  /// Takes a host's link down. It stays down.
  void cut(int host) const;

  /// Bytes that a host has sent.
  struct Sent {
    int64_t wire = 0;     ///< with headers; a segment that the kernel passes on whole has one
    int64_t payload = 0;  ///< without the headers of TCP over IPv4 and Ethernet
  };
  /// Returns the bytes that each host has sent since it was made, as its link's port at the bridge
  /// has counted them.
  std::vector<Sent> sent() const;

 private:
  void add_host(int host, double mbit, const std::string& congestion);
  void remove() noexcept;

  const std::string prefix_;
  const int hosts_;
};

}  // namespace tessera::tools
