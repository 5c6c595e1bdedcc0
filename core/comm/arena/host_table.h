#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Maps ranks to hosts. Hosts are numbered in the order of their first ranks, and the ranks of a
/// host (by index) in rank order.
class HostTable {
 public:
  /// `names`: the name of each rank's host, by rank.
  explicit HostTable(const std::vector<std::string>& names) {
    std::map<std::string, int> numbers;
    for (size_t rank = 0; rank < names.size(); ++rank) {
      const int host = numbers.emplace(names[rank], hosts()).first->second;
      if (host == hosts()) ranks_.emplace_back();
      places_.emplace_back(host, static_cast<int>(ranks_[host].size()));
      ranks_[host].push_back(static_cast<int>(rank));
    }
  }

  int hosts() const { return static_cast<int>(ranks_.size()); }
  /// Returns the number of ranks of each host; 0 if hosts differ in it.
  int ranks_per_host() const {
    const size_t first = ranks_.front().size();
    const bool equal = std::ranges::all_of(
        ranks_, [&](const std::vector<int>& ranks) { return ranks.size() == first; });
    return equal ? static_cast<int>(first) : 0;
  }

  /// Returns the ranks of a host, by index.
  const std::vector<int>& ranks_of(int host) const { return ranks_[host]; }
  int host_of(int rank) const { return places_[rank].first; }
  /// Returns the rank's index among the ranks of its host.
  int index_of(int rank) const { return places_[rank].second; }
  /// Returns the ranks with this index, one per host, in host order: a rail.
  std::vector<int> rail(int index) const {
    std::vector<int> ranks;
    for (const auto& host : ranks_) ranks.push_back(host[index]);
    return ranks;
  }

 private:
  std::vector<std::vector<int>> ranks_;      // by host and index
  std::vector<std::pair<int, int>> places_;  // by rank
};

}  // namespace tessera
