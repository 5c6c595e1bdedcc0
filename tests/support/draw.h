#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace tessera::testing {

/// The choices for one input of a fuzz test: the same for the same number, on every machine.
class Draw {
 public:
  explicit Draw(uint64_t number) : engine_(number * 0x9e3779b97f4a7c15ULL + 1) {}

  /// A number from 0 to `size` - 1.
  size_t below(size_t size) { return size == 0 ? 0 : engine_() % size; }
  /// True in `percent` of a hundred cases.
  bool chance(size_t percent) { return below(100) < percent; }
  template <class T>
  const T& pick(const std::vector<T>& items) {
    return items[below(items.size())];
  }

  /// A number at which sums, products and conversions go wrong, or any small one.
  int64_t number() {
    static const std::vector<int64_t> kEdges = {-1,
                                                0,
                                                1,
                                                2,
                                                63,
                                                65,
                                                127,
                                                255,
                                                65'535,
                                                int64_t{1} << 20,
                                                (int64_t{1} << 31) - 1,
                                                int64_t{1} << 31,
                                                int64_t{1} << 32,
                                                int64_t{1} << 33,
                                                int64_t{1} << 40,
                                                (int64_t{1} << 53) + 1,
                                                int64_t{1} << 61,
                                                int64_t{1} << 62,
                                                INT64_MAX - 7,
                                                INT64_MAX,
                                                INT64_MIN,
                                                INT64_MIN + 1};
    return chance(70) ? pick(kEdges) : static_cast<int64_t>(below(300)) - 20;
  }

  std::string text() {
    static const std::vector<std::string> kTexts = {"",
                                                    "-1",
                                                    "..",
                                                    "../one",
                                                    "/",
                                                    "a",
                                                    std::string(1, '\0'),
                                                    "0",
                                                    "1e400",
                                                    "é",
                                                    "\xff\xfe",
                                                    "rank",
                                                    "F32",
                                                    "BF16",
                                                    "BOOL",
                                                    "F8_E5M2",
                                                    "nan",
                                                    "inf",
                                                    "param",
                                                    "state",
                                                    "tensor",
                                                    "model.safetensors",
                                                    "index.json",
                                                    "__metadata__",
                                                    "[",
                                                    "]",
                                                    "{\"from\":",
                                                    "\"",
                                                    "\\u00",
                                                    "null",
                                                    "18446744073709551616",
                                                    std::string(300, '[')};
    return chance(90) ? pick(kTexts) : std::string(below(70'000), 'x');
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera::testing
