#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera {

/// Distributes pieces that can't be cut over ranks: each goes to the rank with the least load so
/// far, the lowest of equals.
class LeastLoaded {
 public:
  explicit LeastLoaded(int ranks) : load_(ranks, 0) {}

  int ranks() const { return static_cast<int>(load_.size()); }
  /// The rank that the next piece goes to.
  int next() const {
    return static_cast<int>(std::min_element(load_.begin(), load_.end()) - load_.begin());
  }
  void add(int rank, int64_t amount) { load_[rank] += amount; }

 private:
  std::vector<int64_t> load_;  // by rank
};

}  // namespace tessera
