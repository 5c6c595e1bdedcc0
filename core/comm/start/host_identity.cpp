#include "comm/start/host_identity.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <utility>

namespace tessera {
namespace {

thread_local std::string simulated_host;

std::string link_target(const char* path) {
  std::array<char, 64> target{};
  return ::readlink(path, target.data(), target.size() - 1) > 0 ? target.data() : "";
}

}  // namespace

std::string host_name() {
  if (!simulated_host.empty()) return simulated_host;
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string host_identity() {
  if (!simulated_host.empty()) return simulated_host;
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  return fmt::format("{} {} {}", host_name(), boot_id, link_target("/proc/self/ns/net"));
}

std::string process_space() { return link_target("/proc/self/ns/pid"); }

SimulatedHost::SimulatedHost(std::string name) { simulated_host = std::move(name); }
SimulatedHost::~SimulatedHost() { simulated_host.clear(); }

}  // namespace tessera
