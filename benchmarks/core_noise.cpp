#include "benchmarks/core_noise.h"

#include <algorithm>
#include <array>
#include <thread>

#include "launcher/cores.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

struct Blocks {
  double mean = 0;
  double fastest = 0;
};

// Takes about a tenth of a millisecond: independent products and sums in the first-level cache.
// They occupy the units that a neighbour on the same core would share.
double seconds_of_block(std::array<float, 256>& values) {
  const auto start = Clock::now();
  for (int i = 0; i < 5'000; ++i) {
    for (float& value : values) value = value * 0.999F + 0.001F;
  }
  asm volatile("" : : "r"(values.data()) : "memory");  // else unread results might be omitted
  return Seconds(Clock::now() - start).count();
}

Blocks blocks_on(int core, std::chrono::milliseconds time) {
  stay_on_core(core);
  std::array<float, 256> values{};
  const auto start = Clock::now();
  double sum = 0, fastest = 1;
  int count = 0;
  for (; Clock::now() - start < time; ++count) {
    const double seconds = seconds_of_block(values);
    sum += seconds;
    fastest = std::min(fastest, seconds);
  }
  return {sum / count, fastest};
}

}  // namespace

double CoreNoise::sample(std::chrono::milliseconds time) {
  std::vector<Blocks> blocks(cores_.size());
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < cores_.size(); ++i)
      threads.emplace_back([&, i] { blocks[i] = blocks_on(cores_[i], time); });
  }
  const auto slowest = std::ranges::max(blocks, {}, &Blocks::mean);
  fastest_ = std::min(fastest_, std::ranges::min(blocks, {}, &Blocks::fastest).fastest);
  return slowest.mean / fastest_;
}

}  // namespace tessera::tools
