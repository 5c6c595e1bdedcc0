#pragma once

// The process groups under the common contract, and the inputs of its tests.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <tuple>
#include <vector>

#include "comm/message/gloo_backend.h"
#include "support/run_world.h"

namespace tessera::testing {

constexpr CollectiveTag kTag{.subject = "contract", .channel = Channel::kGrads};

enum class Kind { kGloo, kBackend, kDecorated, kArena, kHosts };

inline ProcessGroupPtr make_process_group(Kind kind, World& world) {
  if (kind == Kind::kGloo || kind == Kind::kArena || kind == Kind::kHosts) {
    return world.process_group();
  }
  if (kind == Kind::kBackend) {
    const auto keys = c10::make_intrusive<c10d::PrefixStore>("backend", world.store());
    auto group = backend_process_group(gloo_backend(keys, world.rank(), world.size(),
                                                    world.process_group()->timeout(), "127.0.0.1"),
                                       world.process_group()->timeout());
    world.process_group()->barrier({"connected"});  // no rank leaves while others connect
    return group;
  }
  return tracing_process_group(
      counting_process_group(fault_process_group(world.process_group(), {})), 8);
}

inline std::string kind_name(Kind kind) {
  switch (kind) {
    case Kind::kGloo:
      return "Gloo";
    case Kind::kBackend:
      return "Backend";
    case Kind::kDecorated:
      return "Decorated";
    case Kind::kArena:
      return "Arena";
    case Kind::kHosts:
      return "Hosts";
  }
  return "?";
}

// Two ranks on each host: neighbours if there are 4 ranks, one of each half if there are more.
inline std::function<int(int)> host_of(int size) {
  return [size](int rank) { return size == 4 ? rank / 2 : rank % (size / 2); };
}

class ProcessGroupContract : public ::testing::TestWithParam<std::tuple<Kind, int>> {
 protected:
  int size() const { return std::get<1>(GetParam()); }

  void run(const std::function<void(ProcessGroup&)>& fn) const {
    const Kind kind = std::get<0>(GetParam());
    if (kind == Kind::kHosts) {
      run_hosts(size(), host_of(size()), [&](World& world) { fn(*world.process_group()); });
      return;
    }
    const auto transport = kind == Kind::kArena ? Transport::kArena : Transport::kGloo;
    run_over(transport, size(), [&](World& world) { fn(*make_process_group(kind, world)); });
  }

  // Even, uneven, with empty parts, small enough to be packed and long enough for several messages.
  std::vector<std::vector<int64_t>> all_bounds() const {
    std::vector<int64_t> even{0}, uneven{0}, first{0}, last{0}, large{0};
    for (int r = 0; r < size(); ++r) {
      even.push_back(even.back() + 16);
      uneven.push_back(uneven.back() + 7 * r * r + 3);
      first.push_back(5);
      last.push_back(r + 1 == size() ? 9 : 0);
      large.push_back(large.back() + 700'001 + 1000 * r);
    }
    const std::vector<int64_t> empty(size() + 1, 0);
    return {even, uneven, first, last, empty, large};
  }
};

inline const std::vector<torch::ScalarType> kDtypes{torch::kFloat, torch::kDouble, torch::kBFloat16,
                                                    torch::kInt64};

// A sequence of numbers, of which the longest part that was asked for is kept: to make those of
// long messages anew took most of the time of the tests.
class Sequence {
 public:
  explicit Sequence(torch::Tensor (*make)(int64_t numel)) : make_(make) {}

  // Shares memory with later results.
  torch::Tensor slice(int64_t begin, int64_t end, torch::ScalarType dtype) {
    const std::lock_guard lock(mutex_);
    torch::Tensor& longest = kept_[dtype];
    if (!longest.defined() || longest.numel() < end) longest = make_(end).to(dtype);
    return longest.slice(0, begin, end);
  }

 private:
  torch::Tensor (*make_)(int64_t numel);
  std::mutex mutex_;
  std::map<torch::ScalarType, torch::Tensor> kept_;
};

// Small whole numbers: sums are exact in every dtype (of numbers) and order.
inline torch::Tensor values(int64_t numel, torch::ScalarType dtype, int rank) {
  static Sequence numbers([](int64_t length) { return torch::arange(length, torch::kInt64) % 13; });
  return numbers.slice(0, numel, dtype) + rank;
}

inline torch::Tensor part(const torch::Tensor& flat, const std::vector<int64_t>& bounds, int rank) {
  return flat.slice(0, bounds[rank], bounds[rank + 1]);
}

// Pieces of many sizes (packed, direct, longer than a message), some without data, with gaps
// between.
struct Cut {
  std::vector<Piece> pieces;
  torch::Tensor covered;  // whether an element lies in a piece
};

inline Cut cut(const torch::Tensor& flat, bool with_undefined) {
  const int64_t lengths[] = {1, 3, 40, 10'000, 17, 300'000, 2, 20'000, 0, 5};
  Cut result{{}, torch::zeros({flat.numel()}, torch::kBool)};
  int64_t begin = 0;
  for (int i = 0; begin < flat.numel(); ++i) {
    const int64_t numel = std::min(lengths[i % 10], flat.numel() - begin);
    const bool undefined = with_undefined && i % 4 == 1;
    auto data = flat.slice(0, begin, begin + numel);
    if (undefined) {
      data.zero_();
    }
    result.pieces.push_back({begin, undefined ? torch::Tensor() : data.clone(), numel});
    result.covered.slice(0, begin, begin + numel).fill_(true);
    begin += numel + (i % 3 == 2 ? 4 : 0);
  }
  return result;
}

// Instantiates a suite for each implementation and these numbers of ranks.
#define TESSERA_CONTRACT(suite, ...)                                                             \
  INSTANTIATE_TEST_SUITE_P(All, suite,                                                           \
                           ::testing::Combine(::testing::Values(Kind::kGloo, Kind::kBackend,     \
                                                                Kind::kDecorated, Kind::kArena), \
                                              ::testing::Values(__VA_ARGS__)),                   \
                           [](const auto& info) {                                                \
                             return kind_name(std::get<0>(info.param)) +                         \
                                    std::to_string(std::get<1>(info.param)) + "Ranks";           \
                           })

}  // namespace tessera::testing
