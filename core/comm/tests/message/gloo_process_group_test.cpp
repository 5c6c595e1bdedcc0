// Promises of the process group over Gloo alone: the order of sums, and channels.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "comm/group/local_sum.h"
#include "support/run_world.h"

namespace tessera::gloo_process_group_test {

std::vector<int64_t> bounds_of(int64_t numel, int size) {
  std::vector<int64_t> bounds(size + 1);
  for (int r = 0; r <= size; ++r) {
    bounds[r] = numel * r / size;
  }
  return bounds;
}

torch::Tensor random_values(int64_t numel, int rank, torch::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(1000 + rank);
  return torch::randn({numel}, generator).to(dtype);
}

class GlooSums : public ::testing::TestWithParam<int> {};

TEST_P(GlooSums, HaveRankOrderToTheBit) {
  run_world(GetParam(), [](World& world) {
    auto& pg = *world.process_group();
    const int64_t numel = 600'011;
    const auto bounds = bounds_of(numel, pg.size());
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
      auto sum = random_values(numel, 0, dtype)
                     .to(dtype == torch::kDouble ? torch::kDouble : torch::kFloat);
      for (int r = 1; r < pg.size(); ++r) {
        sum += random_values(numel, r, dtype).to(sum.scalar_type());
      }
      const auto own = random_values(numel, pg.rank(), dtype);
      const auto expected = (sum * (1.0 / 3)).to(dtype);
      auto out = torch::empty({bounds[pg.rank() + 1] - bounds[pg.rank()]}, dtype);
      pg.reduce_scatter(out, {{0, own, numel}}, bounds, {.scale = 1.0 / 3}, {.subject = "sum"})
          ->wait();
      EXPECT_TRUE(torch::equal(out, expected.slice(0, bounds[pg.rank()], bounds[pg.rank() + 1])))
          << dtype;
      auto whole = own.clone();
      pg.all_reduce(whole, ReduceOp::kSum, {.subject = "sum"})->wait();
      EXPECT_TRUE(torch::equal(whole, sum.to(dtype))) << dtype;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GlooSums, ::testing::Values(1, 2, 3, 4));

class GlooChannels : public ::testing::TestWithParam<int> {};

// Each rank issues channels in its own order, with many collectives under way at once.
TEST_P(GlooChannels, DoNotDependOnEachOther) {
  run_world(GetParam(), [](World& world) {
    auto& pg = *world.process_group();
    const int64_t numel = 40'000;
    const auto bounds = bounds_of(numel, pg.size());
    const int64_t own = bounds[pg.rank() + 1] - bounds[pg.rank()];
    constexpr int kRounds = 25;
    std::vector<torch::Tensor> flats, outs, numbers;
    std::vector<WorkPtr> works;
    const auto gather = [&](int i) {
      flats.push_back(torch::zeros({numel}));
      works.push_back(pg.all_gather(flats.back(), torch::full({own}, i + 0.5), bounds,
                                    {.subject = "gather", .channel = Channel::kParams}));
    };
    const auto reduce = [&](int i) {
      outs.push_back(torch::zeros({own}));
      const auto input = torch::full({numel}, static_cast<float>(i));
      works.push_back(pg.reduce_scatter(outs.back(), {{0, input, numel}}, bounds, {},
                                        {.subject = "reduce", .channel = Channel::kGrads}));
    };
    const auto agree = [&](int i) {
      numbers.push_back(torch::full({2}, i, torch::kInt64));
      works.push_back(pg.all_reduce(numbers.back(), ReduceOp::kSum,
                                    {.subject = "agree", .channel = Channel::kControl}));
    };
    const std::vector<std::function<void(int)>> issue{gather, reduce, agree};
    for (int k = 0; k < 3; ++k) {  // whole channels in another order on each rank
      for (int i = 0; i < kRounds; ++i) {
        issue[(k + pg.rank()) % 3](i);
      }
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) {
      (*work)->wait();
    }
    for (int i = 0; i < kRounds; ++i) {
      EXPECT_TRUE(torch::equal(flats[i], torch::full({numel}, i + 0.5)));
      EXPECT_TRUE(torch::equal(outs[i], torch::full({own}, static_cast<float>(i * pg.size()))));
      EXPECT_EQ(numbers[i][1].item<int64_t>(), i * pg.size());
    }
  });
}

// Ranks wait for a collective of one channel before all have issued an earlier one of another.
TEST_P(GlooChannels, CanBeWaitedForInAnyOrder) {
  run_world(GetParam(), [](World& world) {
    auto& pg = *world.process_group();
    const int64_t numel = 300'000;
    const auto bounds = bounds_of(numel, pg.size());
    const int64_t own = bounds[pg.rank() + 1] - bounds[pg.rank()];
    auto late = torch::zeros({own}), early = torch::zeros({own});
    const auto ones = torch::ones({numel});
    WorkPtr late_work;
    const auto start_late = [&] {
      late_work = pg.reduce_scatter(late, {{0, ones, numel}}, bounds, {},
                                    {.subject = "late", .channel = Channel::kParams});
    };
    if (pg.rank() == 0) {
      start_late();
      EXPECT_FALSE(late_work->is_completed() && pg.size() > 1);
    }
    pg.reduce_scatter(early, {{0, ones, numel}}, bounds, {},
                      {.subject = "early", .channel = Channel::kGrads})
        ->wait();
    if (pg.rank() != 0) {
      start_late();
    }
    late_work->wait();
    EXPECT_EQ(late.sum().item<double>(), static_cast<double>(own * pg.size()));
  });
}

// A rank may drop the handle of a collective that its peers have not even issued.
TEST_P(GlooChannels, FinishWhatNobodyWaitsFor) {
  run_world(GetParam(), [](World& world) {
    auto& pg = *world.process_group();
    const int64_t numel = 2'000'000;
    const auto bounds = bounds_of(numel, pg.size());
    const int64_t own = bounds[pg.rank() + 1] - bounds[pg.rank()];
    auto flat = torch::zeros({numel});
    {
      const auto work = pg.all_gather(flat, torch::ones({own}), bounds, {.subject = "dropped"});
      if (pg.rank() == pg.size() - 1) {
        work->wait();
        EXPECT_EQ(flat.sum().item<double>(), static_cast<double>(numel));
      }
    }
    pg.barrier({.subject = "end"});
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GlooChannels, ::testing::Values(1, 2, 3, 4, 17));

TEST(GlooProcessGroup, ReducesTheRarerDtypes) {
  run_world(3, [](World& world) {
    auto& pg = *world.process_group();
    const auto bounds = bounds_of(100, 3);
    const int64_t own = bounds[pg.rank() + 1] - bounds[pg.rank()];
    for (const auto dtype : {torch::kInt32, torch::kInt16, torch::kInt8, torch::kUInt8,
                             torch::kBool, torch::kComplexFloat}) {
      const auto input = (torch::arange(100) % 3 == pg.rank()).to(dtype);
      auto out = torch::zeros({own}, dtype);
      pg.reduce_scatter(out, {{0, input, 100}}, bounds, {}, {.subject = "rare"})->wait();
      EXPECT_TRUE(torch::equal(out, torch::ones({own}, dtype))) << dtype;
      auto flat = torch::zeros({100}, dtype);
      pg.all_gather(flat, out, bounds, {.subject = "rare"})->wait();
      EXPECT_TRUE(torch::equal(flat, torch::ones({100}, dtype))) << dtype;
    }
    auto odd = torch::zeros({own}, torch::kFloat8_e4m3fn);
    EXPECT_THROW(pg.reduce_scatter(odd, {}, bounds, {}, {.subject = "rare"}),
                 c10::NotImplementedError);
  });
}

TEST(LocalSum, LetsNaNWinComparisons) {
  const float a[] = {1, NAN, 3};
  const float b[] = {NAN, 2, 2};
  const void* inputs[] = {a, b};
  for (const auto op : {ReduceOp::kMax, ReduceOp::kMin}) {
    float out[3];
    reduce_in_order({.dtype = at::kFloat, .op = op}, out, inputs, 3);
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]));
    EXPECT_EQ(out[2], op == ReduceOp::kMax ? 3 : 2);
  }
}

}  // namespace tessera::gloo_process_group_test
