#pragma once

#include <chrono>
#include <vector>

namespace tessera::tools {

/// Measures how much slower the cores are than they can be, for reasons outside this machine's
/// programs: the host runs something else on the same hardware, or lowers its clock. Uses
/// arithmetic that needs no memory, on all cores at once.
class CoreNoise {
 public:
  /// `cores`: ids as `Cores::ids` has them.
  explicit CoreNoise(std::vector<int> cores) : cores_(std::move(cores)) {}

  /// Takes `time`; must be called while the cores are otherwise idle. Returns the mean time of the
  /// slowest core's blocks of arithmetic, divided by that of the fastest block of all cores so far:
  /// at least 1; 1 is no noise.
  double sample(std::chrono::milliseconds time);

 private:
  std::vector<int> cores_;
  double fastest_ = 1;  // seconds of a block
};

}  // namespace tessera::tools
