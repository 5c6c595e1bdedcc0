#include "comm/start/slurm.h"

#include <charconv>
#include <cstddef>
#include <ranges>

#include "comm/group/environment.h"

namespace tessera {

std::string first_node(std::string_view node_list) {
  std::string node;
  size_t i = 0;
  while (i < node_list.size() && node_list[i] != ',') {
    if (node_list[i] != '[') {
      node += node_list[i++];
      continue;
    }
    const size_t end = node_list.find_first_of(",-]", i + 1);
    if (end == std::string_view::npos) return "";
    node += node_list.substr(i + 1, end - i - 1);
    const size_t close = node_list.find(']', end);
    if (close == std::string_view::npos) return "";
    i = close + 1;
  }
  return node;
}

std::optional<int> count_of_node(std::string_view counts, int node) {
  for (const auto part : std::views::split(counts, ',')) {
    const std::string_view entry(part.begin(), part.end());
    int count = 0, repeats = 1;
    std::from_chars(entry.data(), entry.data() + entry.size(), count);
    if (const size_t times = entry.find("(x"); times != std::string_view::npos) {
      std::from_chars(entry.data() + times + 2, entry.data() + entry.size(), repeats);
    }
    if (count < 1 || repeats < 1) return std::nullopt;
    if (node < repeats) return count;
    node -= repeats;
  }
  return std::nullopt;
}

std::optional<int> slurm_tasks_on_this_node(int world_size) {
  const auto counts = environment({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  const auto node = environment_number("SLURM_NODEID");
  if (counts && node && *node >= 0) return count_of_node(*counts, *node);
  auto nodes = environment_number("SLURM_STEP_NUM_NODES");
  if (!nodes) nodes = environment_number("SLURM_NNODES");
  return nodes == 1 ? std::optional<int>(world_size) : std::nullopt;
}

}  // namespace tessera
