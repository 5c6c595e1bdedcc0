#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace tessera::differential {

/// Random choices that depend on the seed alone: SplitMix64, whose numbers are the same with every
/// compiler and standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  /// A whole number from `low` to `high`.
  int between(int low, int high) {
    return low + static_cast<int>(next() % static_cast<uint64_t>(high - low + 1));
  }
  /// True once in `times`.
  bool once_in(int times) { return between(1, times) == 1; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int>(choices.size()) - 1)];
  }
  std::vector<int> permutation(int size) {
    std::vector<int> order;
    for (int i = 0; i < size; ++i) order.insert(order.begin() + between(0, i), i);
    return order;
  }

 private:
  uint64_t state_;
};

}  // namespace tessera::differential
