#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Returns the first host of a SLURM node list: "node[03-05,9],x" gives "node03". Empty for an
/// empty list.
std::string first_node(std::string_view node_list);

/// Returns the `node`-th count of a SLURM list of counts: "2(x3),1" stands for 2, 2, 2, 1.
std::optional<int> count_of_node(std::string_view counts, int node);

/// Returns how many tasks of this step run on this node, if SLURM says so.
std::optional<int> slurm_tasks_on_this_node(int world_size);

}  // namespace tessera
