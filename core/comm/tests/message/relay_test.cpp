// Among many ranks, small data is passed on: few messages, the same results.
#include <gtest/gtest.h>
#include <tessera/comm/process_group.h>
#include <torch/torch.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/group/capability.h"
#include "support/error_of.h"
#include "support/run_world.h"

namespace tessera::relay_test {

using testing::error_of;

constexpr CollectiveTag kTag{.subject = "relay", .channel = Channel::kControl};

SentMessages sent_by(World& world) {
  return capability<SendsMessages>(*world.process_group())->sent();
}

int64_t rounds_of(int size) { return std::bit_width(static_cast<unsigned>(size - 1)); }

class Relay : public ::testing::TestWithParam<int> {
 protected:
  static void run(const std::function<void(World&)>& fn) {
    run_world(GetParam(), fn, std::chrono::seconds(60));
  }
};

TEST_P(Relay, GathersInLogNMessages) {
  run([](World& world) {
    auto& pg = *world.process_group();
    const int rank = pg.rank(), size = pg.size();
    std::vector<int64_t> even{0}, uneven{0}, most_empty{0};
    for (int r = 0; r < size; ++r) {
      even.push_back(even.back() + 16);
      uneven.push_back(uneven.back() + (7 * r) % 11);
      most_empty.push_back(most_empty.back() + (r == 5 ? 9 : 0));
    }
    const std::vector<int64_t> empty(size + 1, 0);
    for (const auto& bounds : {even, uneven, most_empty, empty}) {
      const auto expected = torch::arange(bounds.back(), torch::kFloat64);
      const auto shard = expected.slice(0, bounds[rank], bounds[rank + 1]).clone();
      auto flat = torch::full({bounds.back()}, -1, torch::kFloat64);
      const SentMessages before = sent_by(world);
      pg.all_gather(flat, shard, bounds, kTag)->wait();
      EXPECT_TRUE(torch::equal(flat, expected));
      EXPECT_LE(sent_by(world).count - before.count, 2 * rounds_of(size));
      auto in_place = torch::full({bounds.back()}, -1, torch::kFloat64);
      const auto own = in_place.slice(0, bounds[rank], bounds[rank + 1]);
      own.copy_(shard);
      pg.all_gather(in_place, own, bounds, kTag)->wait_inputs();
      EXPECT_TRUE(torch::equal(in_place, expected));
    }
  });
}

TEST_P(Relay, SendsAsManyBytesInAllAsADirectExchange) {
  run([](World& world) {
    auto& pg = *world.process_group();
    const int size = pg.size();
    std::vector<int64_t> bounds(size + 1);
    std::iota(bounds.begin(), bounds.end(), 0);
    auto flat = torch::zeros({size}, torch::kInt64);
    const SentMessages before = sent_by(world);
    pg.all_gather(flat, torch::full({1}, pg.rank(), torch::kInt64), bounds, kTag)->wait();
    const auto nbytes = torch::tensor({sent_by(world).nbytes - before.nbytes}, torch::kInt64);
    pg.all_reduce(nbytes, ReduceOp::kSum, kTag)->wait();
    EXPECT_EQ(nbytes.item<int64_t>(), int64_t{8} * size * (size - 1));
  });
}

TEST_P(Relay, SumsHaveRankOrderToTheBit) {
  run([](World& world) {
    auto& pg = *world.process_group();
    const int64_t numel = 101;
    const auto values_of = [&](int rank) {
      return torch::arange(numel, torch::kFloat32).mul_(0.37F * static_cast<float>(rank)).sin_();
    };
    auto expected = values_of(0);
    for (int r = 1; r < pg.size(); ++r) expected += values_of(r);
    auto sum = values_of(pg.rank());
    const SentMessages before = sent_by(world);
    pg.all_reduce(sum, ReduceOp::kSum, kTag)->wait();
    EXPECT_LE(sent_by(world).count - before.count, 2 * rounds_of(pg.size()));
    EXPECT_TRUE(torch::equal(sum, expected));
    auto most = torch::full({3}, pg.rank(), torch::kFloat32);
    if (pg.rank() == 3) most[1] = NAN;
    pg.all_reduce(most, ReduceOp::kMax, kTag)->wait();
    EXPECT_EQ(most[0].item<float>(), static_cast<float>(pg.size() - 1));
    EXPECT_TRUE(std::isnan(most[1].item<float>()));
    auto none = torch::zeros({0});
    pg.all_reduce(none, ReduceOp::kSum, kTag)->wait();
    EXPECT_EQ(none.numel(), 0);
  });
}

TEST_P(Relay, ABarrierHoldsUntilAllHaveCome) {
  std::atomic<int> arrived = 0;
  run([&](World& world) {
    auto& pg = *world.process_group();
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      const SentMessages before = sent_by(world);
      pg.barrier(kTag);
      EXPECT_LE(sent_by(world).count - before.count, 2 * rounds_of(pg.size()));
      EXPECT_GE(arrived.load(), round * pg.size());
    }
  });
}

TEST_P(Relay, BringsTextsOfAnyLength) {
  run([](World& world) {
    auto& pg = *world.process_group();
    const auto text_of = [](int rank) {  // the longest are sent directly
      return std::string(rank % 3 == 0 ? 0 : rank * 900, static_cast<char>('a' + rank % 26));
    };
    const auto texts = all_gather_bytes(pg, text_of(pg.rank()), kTag);
    for (int r = 0; r < pg.size(); ++r) EXPECT_EQ(texts[r], text_of(r));
  });
}

// A rank passes data on even while it waits for another channel.
TEST_P(Relay, IsPassedOnByARankThatDoesNotWaitForIt) {
  run([](World& world) {
    auto& pg = *world.process_group();
    const CollectiveTag other{.subject = "other", .channel = Channel::kParams};
    auto first = torch::ones({8}), second = torch::ones({8});
    const bool odd = pg.rank() % 2 == 1;
    const auto start_first = [&] { return pg.all_reduce(first, ReduceOp::kSum, kTag); };
    const auto start_second = [&] { return pg.all_reduce(second, ReduceOp::kSum, other); };
    const WorkPtr a = odd ? start_first() : start_second();
    const WorkPtr b = odd ? start_second() : start_first();
    a->wait();
    b->wait();
    EXPECT_EQ(first[0].item<float>(), static_cast<float>(pg.size()));
    EXPECT_EQ(second[0].item<float>(), static_cast<float>(pg.size()));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Relay, ::testing::Values(5, 7, 8, 17, 32));

TEST(RelayFailures, ARankThatDisagreesIsAnErrorOnAllRanks) {
  std::atomic<int> errors = 0;
  run_world(
      17,
      [&](World& world) {
        auto& pg = *world.process_group();
        auto tensor = torch::ones({pg.rank() == 4 ? 3 : 2});
        const std::string error = error_of<c10::DistBackendError>(
            [&] { pg.all_reduce(tensor, ReduceOp::kSum, kTag)->wait(); });
        testing::expect_contains(error, {"[all_reduce] unit 'relay'"});
        if (error != "no error") ++errors;
      },
      std::chrono::seconds(5));
  EXPECT_EQ(errors, 17);
}

TEST(RelayFailures, ARankThatStaysAwayIsAnErrorOnAllOthers) {
  std::atomic<int> errors = 0;
  run_world(
      17,
      [&](World& world) {
        auto& pg = *world.process_group();
        if (pg.rank() != 4) {
          const std::string error = error_of<c10::DistBackendError>([&] { pg.barrier(kTag); });
          testing::expect_contains(error, {"[barrier] unit 'relay'"});
          if (error != "no error") ++errors;
        }
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (errors < 16 && std::chrono::steady_clock::now() < until)
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
      },
      std::chrono::seconds(3));
  EXPECT_EQ(errors, 16);
}

}  // namespace tessera::relay_test
