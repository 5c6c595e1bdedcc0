#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Which ranks are on which host. Hosts are numbered in the order of their first ranks, the ranks
/// of a host by their order.
class HostTable {
 public:
  /// `names`: of each rank's host.
  explicit HostTable(const std::vector<std::string>& names);

  int hosts() const { return static_cast<int>(ranks_.size()); }
  /// Ranks of each host; 0 if not all have equally many.
  int ranks_per_host() const;

  int host_of(int rank) const { return places_[rank].first; }
  /// Which of its host's ranks it is.
  int index_of(int rank) const { return places_[rank].second; }
  int rank_at(int host, int index) const { return ranks_[host][index]; }
  /// The ranks with this index, by host: a rail.
  std::vector<int> rail(int index) const;

 private:
  std::vector<std::vector<int>> ranks_;      // by host and index
  std::vector<std::pair<int, int>> places_;  // by rank
};

}  // namespace tessera
