// Parts of reductions that ranks which come late leave to those that are ahead.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <latch>
#include <thread>
#include <vector>

#include "support/arena_parts.h"
#include "support/run_world.h"

namespace tessera {
namespace arena_offer_test {

using namespace testing;
using std::chrono::milliseconds;

constexpr CollectiveTag kTag{.subject = "offers", .channel = Channel::kGrads};
constexpr int64_t kNumel = 200'000;

torch::Tensor values_of(int rank) { return torch::arange(kNumel) * 0.37F + 11.F * rank; }

struct Sum {
  torch::Tensor out;
  WorkPtr work;
};

// Of two ranks, each of which gets half.
Sum start_sum(World& world) {
  const auto out = torch::zeros({kNumel / 2});
  return {out, world.process_group()->reduce_scatter(out, {{0, values_of(world.rank()), kNumel}},
                                                     std::vector<int64_t>{0, kNumel / 2, kNumel},
                                                     {.scale = 0.5}, kTag)};
}

// Rank 1 comes long after rank 0.
class LateSum {
 public:
  Sum start(World& world) {
    if (world.rank() == 1) {
      first_has_come_.wait();
      std::this_thread::sleep_for(milliseconds(2));
    }
    const Sum sum = start_sum(world);
    if (world.rank() == 0) first_has_come_.count_down();
    return sum;
  }

 private:
  std::latch first_has_come_{1};
};

void expect_right(int rank, const Sum& sum) {
  const auto whole = (values_of(0) + values_of(1)) * 0.5F;
  EXPECT_TRUE(torch::equal(sum.out, whole.narrow(0, rank * kNumel / 2, kNumel / 2)));
}

TEST(ArenaOffer, IsTakenByARankThatIsAhead) {
  LateSum late_sum;
  std::latch shown(1), done(1);
  run_arena(2, [&](World& world) {
    const bool is_late = world.rank() == 1;
    const Sum sum = late_sum.start(world);
    if (is_late) {
      shown.count_down();
      done.wait();  // and does not call in
    } else {
      shown.wait();
      sum.work->wait();
      sum.work->wait_inputs();  // all is read, so the other part is done, too
      done.count_down();
    }
    sum.work->wait();
    expect_right(world.rank(), sum);
    EXPECT_EQ(parts_done_for_others(world), is_late ? 0 : 1);
  });
}

// The rank that is ahead does not call in until the late one has done with its sum.
void expect_taken_back(const std::function<void(Work&)>& finish) {
  LateSum late_sum;
  std::latch done(1);
  run_arena(2, [&](World& world) {
    const bool is_late = world.rank() == 1;
    const Sum sum = late_sum.start(world);
    if (!is_late) done.wait();
    finish(*sum.work);
    if (is_late) done.count_down();
    expect_right(world.rank(), sum);
    EXPECT_EQ(parts_done_for_others(world), 0);
  });
}

TEST(ArenaOffer, IsTakenBackByARankThatWaits) {
  expect_taken_back([](Work& work) { work.wait(); });
}

TEST(ArenaOffer, IsTakenBackByARankThatOnlyAsks) {
  expect_taken_back([](Work& work) {
    while (!work.is_completed()) std::this_thread::sleep_for(milliseconds(1));
  });
}

// Whole gradients are kept until they are summed.
TEST(ArenaOffer, IsTakenBackWhenMuchElseWasShown) {
  LateSum late_sum;
  std::latch done(1);
  run_arena(2, [&](World& world) {
    const bool is_late = world.rank() == 1;
    std::vector<Sum> sums{late_sum.start(world)};
    while (sums.size() < 30) sums.push_back(start_sum(world));
    if (!is_late) done.wait();
    // 30 times 0.8 MB were shown; the first of them are done, at once.
    if (is_late) {
      EXPECT_TRUE(sums.front().work->is_completed());
      done.count_down();
    }
    for (const Sum& sum : sums) {
      sum.work->wait();
      expect_right(world.rank(), sum);
    }
  });
}

TEST(ArenaOffer, OfARankThatLeavesIsDoneByItself) {
  LateSum late_sum;
  std::latch left(1);
  run_arena(2, [&](World& world) {
    const int rank = world.rank();
    const Sum sum = late_sum.start(world);
    if (rank == 1) {
      { const World leaving = std::move(world); }
      left.count_down();
    } else {
      left.wait();
      sum.work->wait();
      EXPECT_EQ(parts_done_for_others(world), 0);
    }
    expect_right(rank, sum);
  });
}

// Whoever does a part, the bits are those of Gloo.
TEST(ArenaOffer, ChangesNoBit) {
  for (const bool accumulates : {false, true}) {
    std::vector<torch::Tensor> sums[2];
    for (const Transport transport : {Transport::kArena, Transport::kGloo}) {
      auto& of_ranks = sums[transport == Transport::kGloo];
      of_ranks.resize(3);
      const auto train = [&](World& world) {
        const std::vector<int64_t> bounds{0, 60'001, 120'000, 200'000};
        const int64_t numel = bounds[world.rank() + 1] - bounds[world.rank()];
        torch::Tensor out = torch::full({numel}, 0.25F);
        for (int i = 0; i < 40; ++i) {
          if (i % 5 == world.rank()) std::this_thread::sleep_for(milliseconds(1));
          world.process_group()
              ->reduce_scatter(out, {{0, values_of(world.rank() + i), kNumel}}, bounds,
                               {.scale = 1 / 3., .accumulate = accumulates}, kTag)
              ->wait();
        }
        of_ranks[world.rank()] = out;
      };
      run_world(3, train, std::chrono::seconds(30), transport);
    }
    for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(torch::equal(sums[0][rank], sums[1][rank]));
  }
}

}  // namespace arena_offer_test
}  // namespace tessera
