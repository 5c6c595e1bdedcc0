#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Maps ranks to hosts. Hosts are numbered in the order of their first ranks, and the ranks of a
/// host (by index) in rank order.
class HostTable {
 public:
  /// `names`: the name of each rank's host, by rank.
  explicit HostTable(const std::vector<std::string>& names);

  int hosts() const { return static_cast<int>(ranks_.size()); }
  /// Returns the number of ranks of each host; 0 if hosts differ in it.
  int ranks_per_host() const;

  int host_of(int rank) const { return places_[rank].first; }
  /// Returns the rank's index among the ranks of its host.
  int index_of(int rank) const { return places_[rank].second; }
  int rank_at(int host, int index) const { return ranks_[host][index]; }
  /// Returns the ranks with this index, one per host, in host order: a rail.
  std::vector<int> rail(int index) const;

 private:
  std::vector<std::vector<int>> ranks_;      // by host and index
  std::vector<std::pair<int, int>> places_;  // by rank
};

}  // namespace tessera
