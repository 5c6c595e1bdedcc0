// Training whose messages have 8 bits an element.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include "comm/group/encoding.h"
#include "support/contract.h"
#include "support/counted_job.h"

namespace tessera::testing::quantized_test {

constexpr int kSteps = 12;

struct Trained {
  std::vector<NamedTensor> state;
  std::vector<double> losses;
  CollectiveCounts counts;
  int64_t gradient_bytes = 0;
};

Trained train(World& world, ShardPlan plan) {
  plan.unit_bytes = 3000;
  CountedJob job(run_by<Mlp, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2)), world, plan);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    if (step == kSteps - 1) job.reset_counts();
    job.optimizer.zero_grad();
    const auto loss = job.loss(step % 4);
    loss.backward();
    job.optimizer.step();
    trained.losses.push_back(loss.item<double>());
  }
  trained.counts = job.shard->counts();
  trained.gradient_bytes = job.optimizer.memory().gradients;
  trained.state = job.state();
  return trained;
}

// Trains each plan on all ranks; returns the results by plan and rank.
std::vector<std::vector<Trained>> train_all(const std::vector<ShardPlan>& plans, int ranks,
                                            bool on_hosts) {
  std::vector<std::vector<Trained>> results(plans.size(), std::vector<Trained>(ranks));
  const auto run = [&](World& world) {
    for (size_t i = 0; i < plans.size(); ++i) results[i][world.rank()] = train(world, plans[i]);
  };
  if (on_hosts) {
    run_hosts(ranks, by_halves, run, std::chrono::seconds(60));
  } else {
    run_over(Transport::kGloo, ranks, run, std::chrono::seconds(60));
  }
  return results;
}

double mean_loss(const std::vector<Trained>& ranks) {
  double sum = 0;
  for (const Trained& rank : ranks) sum += rank.losses.back();
  return sum / static_cast<double>(ranks.size());
}

TEST(Quantized, ReplicasStayEqualAndLearnAlmostAsWellWithAQuarterOfTheBytes) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  for (const auto& [ranks, on_hosts] :
       {std::pair(2, false), std::pair(3, false), std::pair(4, true)}) {
    for (const ShardPlan& plain : with_each_partition()) {
      std::vector<ShardPlan> plans = {plain, plain, plain, plain};
      plans[1].precision = {.reduce_dtype = at::kChar, .gather_dtype = at::kChar};
      plans[2].precision = {.reduce_dtype = at::kFloat8_e4m3fn, .gather_dtype = at::kFloat8_e4m3fn};
      plans[3].precision = {.param_dtype = at::kBFloat16,
                            .reduce_dtype = at::kChar,
                            .error_feedback = false,
                            .gather_dtype = at::kChar};
      const auto results = train_all(plans, ranks, on_hosts);
      for (size_t i = 0; i < plans.size(); ++i) {
        const auto what = fmt::format("hosts {}, {}, plan {}", on_hosts, describe(ranks, plain), i);
        for (const Trained& rank : results[i])
          expect_same_state(rank.state, results[i][0].state, 0, what);
        EXPECT_LT(mean_loss(results[i]), 0.5 * results[i][0].losses.front()) << what;
        EXPECT_NEAR(mean_loss(results[i]), mean_loss(results[0]), 0.1 * results[0][0].losses[0])
            << what;
        if (i == 0) continue;
        const auto bytes = [&](const CollectiveCounts& counts) {
          return static_cast<double>(counts.all_gather.bytes_sent +
                                     counts.reduce_scatter.bytes_sent);
        };
        // Small pieces have a scale for fewer elements.
        EXPECT_LT(bytes(results[i][0].counts), 0.3 * bytes(results[0][0].counts)) << what;
      }
      // Forgotten losses need no memory.
      EXPECT_GT(results[1][0].gradient_bytes, results[3][0].gradient_bytes);
    }
  }
}

TEST(Quantized, OneRankSendsNothingAndRoundsNoGradient) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  const auto results =
      train_all({{}, {.precision = {.reduce_dtype = at::kChar}}}, 1, /*on_hosts=*/false);
  expect_same_state(results[1][0].state, results[0][0].state, 0, "one rank");
}

// The first element of each row gets the value 50, and so its neighbours in a block another scale.
TEST(Quantized, AWriteToAParameterIsRoundedWithItsBlockAndKeptAsItIsInTheMasterWeights) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  for (const auto& [dtype, encoding] :
       {std::pair(at::kChar, Encoding::kInt8), std::pair(at::kFloat8_e4m3fn, Encoding::kFloat8)}) {
    for (const Transport transport : kTransports) {
      std::vector<std::vector<NamedTensor>> states(2);
      run_over(transport, 2, [&](World& world) {
        const auto net = seeded(5, [] { return std::make_shared<Mlp>(); });
        ShardPlan plan{.unit_bytes = 3000};
        plan.precision.gather_dtype = dtype;
        auto sharded = fully_shard(net, plan);
        std::vector<at::Tensor> masters;
        for (const auto& unit : sharded.state()->units())
          masters.push_back(unit->master().values().clone());
        {
          const torch::NoGradGuard no_grad;
          for (auto& parameter : net->parameters()) parameter.select(-1, 0).fill_(50);
        }
        int changed = 0;
        sharded.state()->visit_whole_units([&](const Unit& unit) {
          const at::Tensor& master = unit.master().values();
          const at::Tensor before = masters[unit.index()];
          EXPECT_TRUE(at::equal(master, at::where(master == 50, master, before)));
          changed += at::equal(master, before) ? 0 : 1;
          const int64_t begin = unit.updated_begin();
          EXPECT_TRUE(at::equal(unit.full().narrow(0, begin, unit.updated_end() - begin),
                                rounded_by(encoding, master)))
              << unit.label();
        });
        EXPECT_GT(changed, 1);
        states[world.rank()] = sharded.full_state();
      });
      expect_same_state(states[1], states[0], 0, "ranks");
    }
  }
}

TEST(Quantized, NoGradientIsRoundedWhereNothingIsSent) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  for (const int ranks : {2, 3}) {
    run_arena(ranks, [&](World& world) {
      for (const ShardLevel level : kAllLevels) {
        const auto plain = train(world, {.level = level});
        for (const auto dtype : {at::kChar, at::kFloat8_e4m3fn}) {
          const auto state =
              train(world, {.level = level, .precision = {.reduce_dtype = dtype}}).state;
          expect_same_state(state, plain.state, 0, fmt::format("level {}", int(level)));
        }
      }
    });
  }
}

// What lies in memory between parameters must not set the scale of their block.
TEST(Quantized, PaddingOfABucketIsZero) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  ::mallopt(M_PERTURB, 0x8f);  // memory begins as numbers of 3e29
  run_over(Transport::kGloo, 2, [](World&) {
    const auto net = seeded(5, [] { return std::make_shared<Mlp>(3, 2, 5); });
    auto sharded =
        fully_shard(net, {.level = ShardLevel::kNone,
                          .unit_bytes = 0,
                          .bucket_bytes = 1 << 20,
                          .precision = {.reduce_dtype = at::kChar, .error_feedback = false}});
    net->forward(torch::ones({2, 3})).sum().backward();
    for (const at::Tensor& param : net->parameters())
      EXPECT_GT(sharded.full_grad(param).abs().max().item<float>(), 0);
  });
  ::mallopt(M_PERTURB, 0);
}

// One element of each block has a gradient of 1, the others, on rank 0 alone, one that is less than
// half of the unit to which it is rounded then: without error feedback they would stay.
void expect_small_gradients_to_arrive(World& world, ShardLevel level) {
  constexpr int kMany = 200;
  constexpr double kSmall = 0.003, kRate = 0.01;
  const auto slopes_of = [](double small) {
    const auto slopes = at::full({1024}, small);
    slopes.view({4, 256}).select(1, 17).fill_(1);
    return slopes;
  };
  const auto slopes = slopes_of(world.rank() == 0 ? kSmall : 0);
  struct Line : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", torch::zeros({1024}));
  };
  const auto net = std::make_shared<Line>();
  auto sharded = fully_shard(net, {.level = level, .precision = {.reduce_dtype = at::kChar}});
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(kRate));
  ShardedOptimizer optimizer(sharded, sgd, {.fused = false});
  for (int step = 0; step < kMany; ++step) {
    optimizer.zero_grad();
    net->weight.dot(slopes).backward();
    optimizer.step();
  }
  // At most half a unit of each of two roundings is held back. Values that are rounded are at most
  // 1 and what was held back before, so a unit is at most 1.01 / 127.
  const double bound = kRate * 2 * 0.5 * 1.01 / 127 + kMany * 2e-7;
  const at::Tensor weight = sharded.full_state()[0].tensor;
  const at::Tensor expected = -kMany * kRate * slopes_of(kSmall / world.size());
  EXPECT_LT((weight - expected).abs().max().item<double>(), bound)
      << fmt::format("rank {} of {}, level {}", world.rank(), world.size(), int(level));
}

TEST(Quantized, ErrorFeedbackBringsSmallGradientsAtEachLevel) {
  TESSERA_ON_HOST_ONLY("a device's backend sends no encoded messages");
  const auto run = [](World& world) {
    for (const ShardLevel level : kAllLevels) expect_small_gradients_to_arrive(world, level);
  };
  for (const int ranks : {2, 3}) run_over(Transport::kGloo, ranks, run, std::chrono::seconds(60));
  run_hosts(4, by_halves, run, std::chrono::seconds(60));
}

TEST(Quantized, BackendsThatSendPlainElementsAreRefusedAtWrap) {
  run_world(2, [](World& world) {
    const auto group = make_process_group(Kind::kBackend, world);
    for (auto Precision::*const field : {&Precision::reduce_dtype, &Precision::gather_dtype}) {
      ShardPlan plan{.process_group = counting_process_group(group)};
      plan.precision.*field = at::kChar;
      const auto net = std::make_shared<Mlp>();
      expect_error([&] { fully_shard(net, plan); },
                   {"[fully_shard]", "messages over gloo can't be sent as int8"});
      fully_shard(net, {.process_group = group});  // nothing of it was changed
    }
  });
}

TEST(Quantized, PlansThatContradictAreRefused) {
  const auto refuse = [](ShardPlan plan, const std::vector<std::string>& words) {
    plan.process_group = single_process_group();
    expect_error([&] { fully_shard(std::make_shared<Mlp>(), plan); }, words);
  };
  refuse({.bucket_bytes = 100, .precision = {.reduce_dtype = at::kChar}},
         {"error_feedback can't go with bucket_bytes", "got bucket_bytes 100"});
  refuse({.replicate_group = single_process_group(), .precision = {.reduce_dtype = at::kChar}},
         {"reduce_dtype Char can't go with replicate_group"});
  refuse({.precision = {.param_dtype = at::kHalf, .gather_dtype = at::kChar}},
         {"gather_dtype Char is for elements of float and bfloat16; got Half"});
  refuse({.precision = {.gather_dtype = at::kInt}},
         {"must be a floating dtype, or kChar (int8); got Int"});
}

}  // namespace tessera::testing::quantized_test
