#include "arena/host_table.h"

#include <algorithm>
#include <map>

namespace tessera {

HostTable::HostTable(const std::vector<std::string>& names) {
  std::map<std::string, int> numbers;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    const int host = numbers.emplace(names[rank], hosts()).first->second;
    if (host == hosts()) ranks_.emplace_back();
    places_.emplace_back(host, static_cast<int>(ranks_[host].size()));
    ranks_[host].push_back(static_cast<int>(rank));
  }
}

int HostTable::ranks_per_host() const {
  const bool equal = std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& ranks) {
    return ranks.size() == ranks_.front().size();
  });
  return equal ? static_cast<int>(ranks_.front().size()) : 0;
}

std::vector<int> HostTable::rail(int index) const {
  std::vector<int> ranks;
  for (const auto& host : ranks_) ranks.push_back(host[index]);
  return ranks;
}

}  // namespace tessera
