// Replicas whose differences are sent in 8 bits.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "comm/group/encoding.h"
#include "engine/tests/optim/outer_job.h"

namespace tessera::testing::outer_rounded_test {

using outer_test::OuterJob;
using outer_test::OuterRun;

// This rank's part of each unit: when a round began, before its average, and after it.
struct RoundParts {
  std::vector<torch::Tensor> start, end, averaged;
};

std::vector<torch::Tensor> parts_of(const OuterJob& job) {
  std::vector<torch::Tensor> parts;
  for (const auto& unit : job.sharded.state()->units()) parts.push_back(unit->updated().clone());
  return parts;
}

constexpr OuterStep kRounded{.every = 2, .learning_rate = 0.5, .momentum = 0.75};

// A twin that is never averaged has the values before each average.
std::vector<RoundParts> train_rounds(World& world, const OuterRun& run, ShardPlan plan) {
  OuterJob job(world, run, plan);
  plan.outer->every = 1000;
  OuterJob twin(world, run, plan);
  std::vector<RoundParts> rounds;
  for (int round = 0; round < 3; ++round) {
    RoundParts parts{.start = parts_of(job)};
    for (int step = 2 * round; step < 2 * round + 2; ++step) job.step(step), twin.step(step);
    parts.end = parts_of(twin);
    parts.averaged = parts_of(job);
    rounds.push_back(parts);
    twin.sharded.load_full_state(job.state());
  }
  return rounds;
}

// Computes the averages of a unit from the parts of the replicas, and compares them.
void expect_rounded_averages(const std::vector<std::vector<RoundParts>>& replicas, size_t unit,
                             Encoding encoding, bool feedback) {
  const auto size = static_cast<int64_t>(replicas.size());
  const auto zeros = torch::zeros_like(replicas[0][0].start[unit]);
  const int64_t numel = zeros.numel(), blocks = (numel + 255) / 256;
  std::vector<torch::Tensor> errors;
  for (int64_t r = 0; r < size; ++r) errors.push_back(zeros.clone());
  const auto sum_errors = zeros.clone(), momentum = zeros.clone();
  for (size_t round = 0; round < replicas[0].size(); ++round) {
    const auto mean = zeros.clone();
    for (int64_t owner = 0; owner < size; ++owner) {
      const int64_t begin = std::min(numel, blocks * owner / size * 256);
      const int64_t end = std::min(numel, blocks * (owner + 1) / size * 256);
      const auto part = [&](const torch::Tensor& all) { return all.narrow(0, begin, end - begin); };
      torch::Tensor sum;
      for (int64_t r = 0; r < size; ++r) {
        const RoundParts& parts = replicas[r][round];
        auto own = part(parts.start[unit] - parts.end[unit]);
        if (r != owner)
          own = rounded_by(encoding, own, feedback ? part(errors[r]) : torch::Tensor());
        sum = r == 0 ? own : sum + own;
      }
      part(mean).copy_(rounded_by(encoding, sum, feedback ? part(sum_errors) : torch::Tensor()));
    }
    mean.div_(size);
    momentum.mul_(kRounded.momentum).add_(mean);
    const auto want = replicas[0][round].start[unit].sub(mean.add(momentum, kRounded.momentum),
                                                         kRounded.learning_rate);
    for (int64_t r = 0; r < size; ++r)
      EXPECT_TRUE(replicas[r][round].averaged[unit].equal(want))
          << "replica " << r << ", round " << round << ", unit " << unit;
  }
}

TEST(OuterRounded, DifferencesOfEightBitsGiveTheBitsOfAComputationByHand) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  for (const auto& [replicas, shards] : {std::pair(2, 1), std::pair(3, 1), std::pair(2, 2)}) {
    for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kParameters}) {
      for (const bool feedback : {true, false}) {
        const at::ScalarType dtype = feedback ? at::kChar : at::kFloat8_e4m3fn;
        ShardPlan plan{.level = level,
                       .unit_bytes = 3000,
                       .outer = kRounded,
                       .precision = {.error_feedback = feedback}};
        plan.outer->reduce_dtype = dtype;
        const OuterRun run{.replicas = replicas, .shards = shards};
        std::vector<std::vector<RoundParts>> rounds(run.ranks());
        run_over(
            Transport::kGloo, run.ranks(),
            [&](World& world) { rounds[world.rank()] = train_rounds(world, run, plan); },
            std::chrono::seconds(60));
        for (int shard = 0; shard < shards; ++shard) {
          std::vector<std::vector<RoundParts>> peers;
          for (int r = 0; r < replicas; ++r) peers.push_back(rounds[r * shards + shard]);
          for (size_t unit = 0; unit < peers[0][0].start.size(); ++unit)
            expect_rounded_averages(peers, unit, *block_encoding(dtype), feedback);
        }
      }
    }
  }
}

TEST(OuterRounded, DifferencesOfEightBitsSendAQuarter) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  for (const int replicas : {2, 3}) {
    const OuterRun run{.replicas = replicas};
    const auto measure = [&](World& world) {
      const auto bytes_of = [&](std::optional<at::ScalarType> dtype) {
        OuterStep outer{.every = 1};
        outer.reduce_dtype = dtype;
        OuterJob job(world, run, {.level = ShardLevel::kNone, .unit_bytes = 6000, .outer = outer});
        job.step(0);
        EXPECT_GT(job.optimizer.memory().optimizer_state, 0);
        return job.replicate->counts().bytes_sent();
      };
      const auto plain = static_cast<double>(bytes_of(std::nullopt));
      const auto rounded = static_cast<double>(bytes_of(at::kChar));
      // Blocks are not divided: a replica may have one more than another of a short unit.
      EXPECT_GT(rounded / plain, 0.2);
      EXPECT_LT(rounded / plain, 0.32);
    };
    run_over(Transport::kGloo, replicas, measure);
  }
  // In a longer unit the ratio is that of a block's bytes.
  run_over(Transport::kGloo, 2, [](World& world) {
    const auto group = counting_process_group(world.process_group());
    const auto bytes_of = [&](std::optional<at::ScalarType> dtype) {
      auto net = std::make_shared<torch::nn::LinearImpl>(512, 64);
      OuterStep outer{.every = 1};
      outer.reduce_dtype = dtype;
      auto sharded = fully_shard(net, {.level = ShardLevel::kNone,
                                       .process_group = single_process_group(),
                                       .replicate_group = group,
                                       .outer = outer});
      torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
      ShardedOptimizer optimizer(sharded, inner);
      net->forward(torch::ones({2, 512})).sum().backward();
      group->reset_counts();
      optimizer.step();
      return group->counts().bytes_sent();
    };
    const int64_t plain = bytes_of(std::nullopt), rounded = bytes_of(at::kChar);
    EXPECT_EQ(plain, 4 * (512 * 64 + 64));
    EXPECT_NEAR(static_cast<double>(rounded) / static_cast<double>(plain), 260.0 / 1024, 0.01);
  });
}

// Gradients inside of a replica have a dtype of their own.
TEST(OuterRounded, DifferencesOfEightBitsGoWithGradientsOfEight) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  const OuterRun run{.shards = 2};
  std::vector<State> states(run.ranks());
  run_over(Transport::kGloo, run.ranks(), [&](World& world) {
    OuterStep outer{.every = 2, .learning_rate = 1, .momentum = 0};
    outer.reduce_dtype = at::kFloat8_e4m3fn;
    OuterJob job(world, run, {.outer = outer, .precision = {.reduce_dtype = at::kChar}});
    job.train(0, 4);
    states[world.rank()] = job.state();
  });
  for (const State& state : states) expect_same_state(state, states[0], 0, "replicas");
  EXPECT_TRUE(states[0][0].tensor.isfinite().all().item<bool>());
}

TEST(OuterRounded, DifferencesAreNotRoundedWhereReplicasShareMemory) {
  TESSERA_ON_HOST_ONLY("ranks of a device share no memory");
  run_over(Transport::kArena, 2, [](World& world) {
    const auto states = [&](std::optional<at::ScalarType> dtype) {
      OuterStep outer{.every = 2};
      outer.reduce_dtype = dtype;
      OuterJob job(world, {}, {.outer = outer});
      job.train(0, 4);
      return job.state();
    };
    expect_same_state(states(at::kChar), states(std::nullopt), 0, "rounded");
  });
}

}  // namespace tessera::testing::outer_rounded_test
