#include "launcher/memory_kills.h"

#include <fstream>
#include <string>

namespace tessera::tools {
namespace {

int64_t count_in(const std::string& path) {
  std::ifstream file(path);
  int64_t count = 0;
  for (std::string name; file >> name >> count;)
    if (name == "oom_kill") return count;
  return -1;
}

}  // namespace

int64_t memory_kills() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t path = line.find(':', line.find(':') + 1) + 1;
    const bool is_unified = line.starts_with("0::");
    if (!is_unified && line.find(":memory:") == std::string::npos) continue;
    const int64_t count =
        count_in((is_unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") + line.substr(path) +
                 (is_unified ? "/memory.events" : "/memory.oom_control"));
    if (count >= 0) return count;
  }
  return count_in("/proc/vmstat");
}

}  // namespace tessera::tools
