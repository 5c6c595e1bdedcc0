#include "benchmarks/linked_hosts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

namespace tessera::tools {
namespace {

constexpr const char* kPrefix = "tessera-link-";
constexpr const char* kNamespaces = "/run/netns";
constexpr const char* kCongestionControl = "/proc/sys/net/ipv4/tcp_congestion_control";
constexpr const char* kAllowed = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";

struct Result {
  bool ok = false;
  std::string text;  // of stdout and stderr
};

// The words are ours: none needs quotes.
Result run(const std::vector<std::string>& command) {
  FILE* const pipe = ::popen(fmt::format("{} 2>&1", fmt::join(command, " ")).c_str(), "r");
  if (pipe == nullptr) return {.ok = false, .text = "no process can be started"};
  Result result;
  char buffer[4096];
  for (size_t size = 0; (size = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    result.text.append(buffer, size);
  result.ok = ::pclose(pipe) == 0;
  return result;
}

std::string need(const std::vector<std::string>& command) {
  const Result result = run(command);
  if (!result.ok)
    throw std::runtime_error(
        fmt::format("the hosts are network namespaces, which need root, iproute2 and a kernel with "
                    "bridges and token buckets; `{}` failed: {}",
                    fmt::join(command, " "), result.text));
  return result.text;
}

// The process in the name of a namespace of this program.
std::optional<pid_t> owner_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  try {
    return std::stoi(name.substr(std::string(kPrefix).size()));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// A process that is killed can't remove its namespaces.
void remove_left_over() {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(kNamespaces, error)) {
    const std::string name = entry.path().filename();
    const auto owner = owner_of(name);
    if (owner && ::kill(*owner, 0) != 0 && errno == ESRCH) run({"ip", "netns", "del", name});
  }
}

std::string port_of(int host) { return fmt::format("port{}", host); }

// A burst of what the link sends in 2 ms lets the kernel pass whole segments on; the queue holds
// 100 ms, so that the senders' windows fill the link.
void limit(const std::string& space, const std::string& interface, double mbit) {
  if (mbit <= 0) return;
  const auto burst = std::max<int64_t>(64 << 10, std::llround(mbit * 1e6 / 8 * 2e-3));
  need({"tc", "-n", space, "qdisc", "add", "dev", interface, "root", "tbf", "rate",
        fmt::format("{:.0f}bit", mbit * 1e6), "burst", std::to_string(burst), "latency", "100ms"});
}

// The name becomes a word of a command.
void check_congestion(const std::string& name) {
  if (name.empty()) return;
  std::ifstream file(kAllowed);
  const std::vector<std::string> names{std::istream_iterator<std::string>(file), {}};
  if (std::ranges::find(names, name) == names.end())
    throw std::invalid_argument(
        fmt::format("--congestion must be one that {} names ({}); got '{}'. Root may add one to it",
                    kAllowed, fmt::join(names, ", "), name));
}

}  // namespace

LinkedHosts::LinkedHosts(int hosts, double mbit, const std::string& congestion)
    : prefix_(fmt::format("{}{}-", kPrefix, ::getpid())), hosts_(hosts) {
  if (hosts < 2 || hosts > 200)
    throw std::invalid_argument(fmt::format("--hosts must be from 2 to 200; got {}", hosts));
  if (!(mbit >= 0))
    throw std::invalid_argument(
        fmt::format("--mbit must be positive, or 0 for no limit; got {}", mbit));
  check_congestion(congestion);
  remove_left_over();
  try {
    const std::string bridge = prefix_ + "bridge";
    need({"ip", "netns", "add", bridge});
    need({"ip", "-n", bridge, "link", "add", "switch0", "type", "bridge"});
    need({"ip", "-n", bridge, "link", "set", "switch0", "up"});
    for (int host = 0; host < hosts_; ++host) add_host(host, mbit, congestion);
  } catch (...) {
    remove();
    throw;
  }
}

LinkedHosts::~LinkedHosts() { remove(); }

bool LinkedHosts::can_be_made() {
  static const bool can = [] {
    try {
      const LinkedHosts hosts(2, 0);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }();
  return can;
}

void LinkedHosts::cut(int host) const {
  need({"ip", "-n", prefix_ + std::to_string(host), "link", "set", kInterface, "down"});
}

void LinkedHosts::add_host(int host, double mbit, const std::string& congestion) {
  const std::string space = prefix_ + std::to_string(host), bridge = prefix_ + "bridge";
  need({"ip", "netns", "add", space});
  need({"ip", "link", "add", "name", kInterface, "netns", space, "type", "veth", "peer", "name",
        port_of(host), "netns", bridge});
  need({"ip", "-n", space, "addr", "add", address(host) + "/24", "dev", kInterface});
  need({"ip", "-n", space, "link", "set", kInterface, "up"});
  need({"ip", "-n", space, "link", "set", "lo", "up"});
  if (!congestion.empty())
    need({"ip", "netns", "exec", space, "sh", "-c",
          fmt::format("'echo {} > {}'", congestion, kCongestionControl)});
  need({"ip", "-n", bridge, "link", "set", port_of(host), "master", "switch0"});
  need({"ip", "-n", bridge, "link", "set", port_of(host), "up"});
  limit(space, kInterface, mbit);
  limit(bridge, port_of(host), mbit);
}

void LinkedHosts::remove() noexcept {
  try {
    for (int host = 0; host < hosts_; ++host)
      run({"ip", "netns", "del", prefix_ + std::to_string(host)});
    run({"ip", "netns", "del", prefix_ + "bridge"});
  } catch (const std::exception&) {  // the next call removes them
  }
}

std::vector<std::string> LinkedHosts::on_host(int host) const {
  return {"ip", "netns", "exec", prefix_ + std::to_string(host)};
}

std::string LinkedHosts::address(int host) const { return fmt::format("10.213.74.{}", 1 + host); }

std::vector<LinkedHosts::Sent> LinkedHosts::sent() const {
  // The headers of Ethernet, IPv4, and TCP with timestamps.
  constexpr int64_t kHeaderBytes = 14 + 20 + 32;
  const auto links =
      nlohmann::json::parse(need({"ip", "-n", prefix_ + "bridge", "-j", "-s", "link", "show"}));
  std::vector<Sent> sent(hosts_);
  for (int host = 0; host < hosts_; ++host) {
    for (const auto& link : links) {
      if (link.at("ifname") != port_of(host)) continue;
      const auto& received = link.at("stats64").at("rx");
      sent[host].wire = received.at("bytes");
      sent[host].payload = sent[host].wire - kHeaderBytes * received.at("packets").get<int64_t>();
    }
  }
  return sent;
}

}  // namespace tessera::tools
