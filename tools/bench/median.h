#pragma once

#include <algorithm>
#include <vector>

namespace tessera::tools {

/// Of an even number of values, the mean of the middle two.
inline double median_of(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return 0.5 * (*middle + *std::max_element(values.begin(), middle));
}

}  // namespace tessera::tools
