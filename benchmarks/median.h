#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace tessera::tools {

/// Returns the median; of an even number of values, the mean of the middle two.
inline double median_of(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return 0.5 * (*middle + *std::max_element(values.begin(), middle));
}

inline double mean_of(const std::vector<double>& values) {
  return std::reduce(values.begin(), values.end()) / static_cast<double>(values.size());
}

struct Interval {
  double low, high;
};

/// Returns two of `values` between which the median of their distribution lies with a probability
/// of 95 % at least, for any distribution; for fewer than six values the least and the largest;
/// these promise less.
inline Interval median_interval(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  // The number of n values that lie below the median is distributed as the heads of n coins.
  double chance = std::pow(0.5, values.size()), below = chance;
  size_t skipped = 0;
  while (true) {
    chance *= static_cast<double>(values.size() - skipped) / static_cast<double>(skipped + 1);
    if (below + chance > 0.025) break;
    below += chance;
    ++skipped;
  }
  return {values[skipped], values[values.size() - 1 - skipped]};
}

}  // namespace tessera::tools
