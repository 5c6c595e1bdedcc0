#include "launcher/cores.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <tuple>

namespace tessera::tools {
namespace {

std::vector<int> allowed_cores() {
  // The kernel refuses a set smaller than its own. That can exceed CPU_SETSIZE.
  for (int capacity = CPU_SETSIZE; capacity <= 64 * CPU_SETSIZE; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    std::vector<int> ids;
    if (::sched_getaffinity(0, bytes, set) == 0) {
      for (int id = 0; id < capacity; ++id) {
        if (CPU_ISSET_S(id, bytes, set)) ids.push_back(id);
      }
    }
    CPU_FREE(set);
    if (!ids.empty()) return ids;
  }
  return {0};
}

int topology_value(int id, const char* name) {
  std::ifstream file(fmt::format("/sys/devices/system/cpu/cpu{}/topology/{}", id, name));
  int value = 0;
  return file >> value ? value : 0;
}

/// Returns the CPU time that the control group grants, in cores; 0 if there is no limit.
int control_group_limit() {
  double quota = 0;
  double period = 0;
  if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file >> quota >> period) {
    return period > 0 ? static_cast<int>(std::ceil(quota / period))
                      : 0;  // "max 100000" fails to parse
  }
  std::ifstream old_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream old_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (old_quota >> quota && old_period >> period && quota > 0 && period > 0) {
    return static_cast<int>(std::ceil(quota / period));
  }
  return 0;
}

}  // namespace

Cores available_cores() {
  Cores cores{.ids = allowed_cores()};
  std::vector<std::tuple<int, int, int>> order;
  for (int id : cores.ids) {
    order.emplace_back(topology_value(id, "physical_package_id"), topology_value(id, "core_id"),
                       id);
  }
  std::sort(order.begin(), order.end());
  std::transform(order.begin(), order.end(), cores.ids.begin(),
                 [](const auto& entry) { return std::get<2>(entry); });
  cores.usable = static_cast<int>(cores.ids.size());
  if (const int limit = control_group_limit(); limit > 0) {
    cores.usable = std::min(cores.usable, limit);
  }
  return cores;
}

std::vector<int> core_slice(const std::vector<int>& ids, int rank, int ranks) {
  const size_t size = ids.size() / ranks;
  const auto begin = ids.begin() + static_cast<ptrdiff_t>(rank * size);
  return {begin, begin + static_cast<ptrdiff_t>(size)};
}

bool stay_on_core(int core) {
  if (core < 0 || core >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  return ::sched_setaffinity(0, sizeof(set), &set) == 0;
}

}  // namespace tessera::tools
