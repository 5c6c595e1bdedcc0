// Gradients of several units in one collective: the bits and bytes of one collective per unit.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "engine/grad/grad_bucket.h"
#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/recomputed_layer.h"
#include "support/sharded_job.h"

namespace tessera::testing::bucket_test {

constexpr int64_t kWidth = 37, kOut = 5, kAll = int64_t{1} << 30;

struct Holder : torch::nn::Module {
  Holder(const torch::Tensor& value, bool requires_grad)
      : value(register_parameter("value", value, requires_grad)) {}
  torch::Tensor value;
};

// All kinds of parameters, in the order of their use: large and small, of two dtypes, tied, frozen,
// empty, unused, and used on some ranks in some steps.
struct Kinds : Net {
  Kinds() {
    const auto linear = [&](const std::string& name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(in, out));
    };
    const auto parameter = [&](const std::string& name, const torch::Tensor& value,
                               bool requires_grad = true) {
      return register_module(name, std::make_shared<Holder>(value, requires_grad))->value;
    };
    first = linear("first", kWidth, kWidth);
    tied = parameter("tied", first->weight);
    frozen = parameter("frozen", torch::randn({kWidth}), false);
    empty = parameter("empty", torch::empty({0}));
    sometimes = linear("sometimes", kWidth, kWidth);
    unused = linear("unused", kWidth, kWidth);
    wide = linear("wide", kWidth, 2000);
    half = parameter("half", torch::randn({2000, kWidth}).mul(0.1).to(torch::kBFloat16));
    last = linear("last", kWidth, kOut);
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::gelu(first(x)).matmul(tied) + frozen + empty.sum();
    if (alike ? step != 1 : rank == step % 2) x = x + sometimes(x);
    x = torch::gelu(wide(x)).to(torch::kBFloat16).matmul(half).to(torch::kFloat);
    return last(x);
  }
  torch::nn::Linear first{nullptr}, sometimes{nullptr}, unused{nullptr}, wide{nullptr},
      last{nullptr};
  torch::Tensor tied, empty, half, frozen;
  bool alike = false;  // all ranks skip `sometimes`, in one step
};

TrainingRun kinds_run() {
  auto run = sgd_run<Kinds>();
  run.make_optimizer = [](Net& net) {
    auto params = net.parameters();
    params.erase(params.begin() + 2);  // "tied" again
    return std::make_unique<torch::optim::SGD>(
        params, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
  };
  return run;
}

// The backwards of one step: reducing (1) or not (0).
using Backwards = std::vector<int>;

struct Training {
  ShardPlan plan;
  Backwards backwards = {1};
  int shard_size = 0;  // with replicas
  bool clears_one = false;

  State operator()(World& world) const {
    ShardPlan own = plan;
    if (shard_size > 0) {
      const auto groups = world.hybrid_process_groups(shard_size);
      own.process_group = groups.shard, own.replicate_group = groups.replicate;
    }
    ShardedJob<Kinds> job(kinds_run(), world, own);
    job.net->alike = plan.level == ShardLevel::kParameters;
    for (int step = 0; step < 3; ++step) {
      job.optimizer.zero_grad();
      for (size_t i = 0; i < backwards.size(); ++i) {
        std::optional<ShardedModule::NoSync> local;
        if (backwards[i] == 0) local.emplace(job.sharded.state());
        job.loss(10 * step + static_cast<int>(i), step).backward();
        // The reduction may still be under way.
        if (clears_one) job.net->wide->weight.mutable_grad().reset();
      }
      job.optimizer.step();
    }
    return job.state();
  }
};

struct Case {
  Training training;
  std::string what = "";
};

// Expects the same bits without buckets, with buckets of some units, and with one of all; each case
// in turn in one world.
void expect_same_bits(int ranks, Transport transport, const std::vector<Case>& cases) {
  constexpr int64_t kBucketBytes[] = {0, 20000, kAll};
  std::vector<Training> trainings;
  for (const Case& c : cases) {
    for (const int64_t bucket_bytes : kBucketBytes) {
      trainings.push_back(c.training);
      trainings.back().plan.bucket_bytes = bucket_bytes;
    }
  }
  const auto states = results_of(
      ranks,
      [&](World& world) {
        std::vector<State> of_trainings;
        for (const Training& training : trainings) of_trainings.push_back(training(world));
        return of_trainings;
      },
      transport);
  for (size_t i = 0; i < trainings.size(); ++i) {
    const size_t c = i / std::size(kBucketBytes);
    const auto what = fmt::format(
        "{}, {} over {}, buckets of {}", cases[c].what, describe(ranks, trainings[i].plan),
        transport == Transport::kArena ? "arena" : "gloo", kBucketBytes[i % 3]);
    std::vector<State> of_ranks;
    for (const auto& of_trainings : states) of_ranks.push_back(of_trainings[i]);
    expect_same_states(of_ranks, states[0][c * std::size(kBucketBytes)], 0, what);
  }
}

class Buckets : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(Over, Buckets, ::testing::ValuesIn(kTransports), transport_of_test);

TEST_P(Buckets, ChangeNoBitAtAnyLevelPartitionAndUnitSize) {
  std::vector<Case> cases;
  for (const int64_t unit_bytes : {0, 6000}) {
    for (const ShardPlan& plan : with_each_partition({.unit_bytes = unit_bytes}))
      cases.push_back({{.plan = plan}});
  }
  for (const int ranks : {1, 2, 3}) expect_same_bits(ranks, GetParam(), cases);
}

TEST_P(Buckets, ChangeNoBitOfGradientsThatAddUp) {
  std::vector<Case> cases;
  for (const Backwards& backwards : {Backwards{1, 1}, {0, 1}, {1, 0, 1, 1}}) {
    for (const ShardLevel level :
         {ShardLevel::kNone, ShardLevel::kGradients, ShardLevel::kParameters}) {
      cases.push_back({{.plan = {.level = level, .unit_bytes = 0}, .backwards = backwards},
                       fmt::format("backwards {}", backwards)});
    }
  }
  expect_same_bits(2, GetParam(), cases);
}

TEST_P(Buckets, ChangeNoBitWithReplicas) {
  for (const auto& [ranks, shard_size] : {std::pair(2, 1), std::pair(4, 2)}) {
    std::vector<Case> cases;
    for (const Backwards& backwards : {Backwards{1}, {1, 1}, {0, 1, 1}}) {
      for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kParameters}) {
        cases.push_back({{.plan = {.level = level, .unit_bytes = 0},
                          .backwards = backwards,
                          .shard_size = shard_size},
                         fmt::format("shards over {}, backwards {}", shard_size, backwards)});
      }
    }
    expect_same_bits(ranks, GetParam(), cases);
  }
}

TEST_P(Buckets, ChangeNoBitWhereOneGradientIsClearedWhileItIsReduced) {
  std::vector<Case> cases;
  for (const ShardPlan& plan : at_each_level({.unit_bytes = 0})) {
    for (const Backwards& backwards : {Backwards{1}, {1, 1}})
      cases.push_back({{.plan = plan, .backwards = backwards, .clears_one = true}, "cleared"});
  }
  expect_same_bits(2, GetParam(), cases);
}

TEST_P(Buckets, ChangeNoBitOfOtherDtypes) {
  std::vector<Case> cases;
  for (const auto reduce_dtype : {at::kFloat, at::kBFloat16}) {
    cases.push_back(
        {{.plan = {.unit_bytes = 0,
                   .precision = {.master_dtype = at::kFloat, .reduce_dtype = reduce_dtype}}},
         "one dtype for all"});
  }
  expect_same_bits(3, GetParam(), cases);
}

struct UsedAgain : Net {
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::gelu(RecomputedLayer::apply(torch::gelu(first(x)), layer));
    return head(torch::gelu(RecomputedLayer::apply(x, layer)));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(kWidth, kWidth));
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(kWidth, kWidth));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(kWidth, kOut));
};

// One of two layers in a bucket is late.
TEST_P(Buckets, GradientsThatComeAfterTheirBucketWasSentAreAdded) {
  std::vector<ParityCase> cases;
  for (ShardPlan plan : at_each_level({.unit_bytes = 0})) {
    for (const int64_t bucket_bytes : {int64_t{8000}, kAll}) {  // of two units, and of all
      plan.bucket_bytes = bucket_bytes;
      cases.push_back({.plan = plan, .tolerance = 2e-6});
    }
  }
  for (const int ranks : {1, 2, 3})
    expect_parity_of_each(sgd_run<UsedAgain>(), ranks, cases, GetParam());
}

TEST_P(Buckets, RanksMayTakeDifferentNumbersOfSteps) {
  const TrainingRun run = sgd_run<Mlp>(kWidth, 3, kOut);
  // One process, in which ranks that are done contribute nothing.
  const auto alone = run.make_net();
  const auto plain = run.make_optimizer(*alone);
  for (int step = 0; step < 5; ++step) {
    plain->zero_grad();
    const Batch batch = global_batch(step, run.rows, run.in, run.out);
    for (int rank = 0; rank < 3; ++rank)
      if (step < 1 + 2 * rank) (rank_loss(*alone, batch, rank, 3, step) / 3).backward();
    plain->step();
  }
  run_over(GetParam(), 3, [&](World& world) {
    for (const int64_t bucket_bytes : {int64_t{0}, kAll}) {
      ShardedJob job(
          run, world,
          {.level = ShardLevel::kGradients, .unit_bytes = 3000, .bucket_bytes = bucket_bytes});
      join(job.sharded, {&job.optimizer}, [&] { job.train(0, 1 + 2 * world.rank()); });
      EXPECT_EQ(job.optimizer.steps(), 5);
      expect_same_state(job.state(), plain_state(*alone), 2e-6, "joined");
    }
  });
}

// --- traffic

// Counts of a step, after some steps that learn the order.
struct Counted {
  CollectiveCounts counts;
  int64_t units = 0;
  ShardMemory memory;
};
Counted count_step(int ranks, const ShardPlan& wanted, int backwards = 1) {
  Counted counted;
  run_world(ranks, [&](World& world) {
    const auto counter = counting_process_group(world.process_group());
    ShardPlan plan = wanted;
    plan.process_group = counter;
    ShardedJob job(sgd_run<Mlp>(kWidth, 4, kOut), world, plan, {});
    for (int step = 0; step < 3; ++step) {
      counter->reset_counts();
      job.optimizer.zero_grad();
      for (int i = 0; i < backwards; ++i) job.backward(step);
      job.optimizer.step();
    }
    if (world.rank() != 0) return;
    counted = {counter->counts(), static_cast<int64_t>(job.sharded.state()->units().size()),
               job.optimizer.memory()};
  });
  return counted;
}

TEST(BucketTraffic, ABucketThatHoldsAllIsOneReductionABackwardOfTheSameBytes) {
  for (const int ranks : {2, 3}) {
    for (ShardPlan plan : with_each_partition({.unit_bytes = 0})) {
      const auto apart = count_step(ranks, plan, 2);
      plan.bucket_bytes = kAll;
      const auto together = count_step(ranks, plan, 2);
      EXPECT_EQ(apart.counts.reduce_scatter.calls, 2 * apart.units);
      EXPECT_GT(apart.units, 10);
      EXPECT_EQ(together.counts.reduce_scatter.calls, 2);
      EXPECT_EQ(together.counts.bytes_sent(), apart.counts.bytes_sent());
      // At kNone, the reduction of a unit by itself may gather its sums.
      if (plan.level != ShardLevel::kNone || !tests_on_host()) {
        EXPECT_EQ(together.counts.reduce_scatter.bytes_sent,
                  apart.counts.reduce_scatter.bytes_sent);
        EXPECT_EQ(together.counts.all_gather.calls, apart.counts.all_gather.calls);
      }
      EXPECT_EQ(together.counts.all_reduce.calls, apart.counts.all_reduce.calls);
      EXPECT_EQ(together.memory.gradients, apart.memory.gradients);
    }
  }
}

TEST(BucketTraffic, ReplicasAddUpABucketInOneCollective) {
  run_world(4, [](World& world) {
    const auto groups = world.hybrid_process_groups(2);
    const auto across = counting_process_group(groups.replicate);
    ShardedJob job(sgd_run<Mlp>(kWidth, 4, kOut), world,
                   {.unit_bytes = 0,
                    .bucket_bytes = kAll,
                    .process_group = groups.shard,
                    .replicate_group = across});
    across->reset_counts();
    job.step(0);
    EXPECT_EQ(across->counts().all_reduce.calls, 2) << "the bucket, and which were used";
  });
}

// The buckets of a model's units, checked independently of the rule's code.
TEST(BucketTraffic, BucketsAreRunsOfTheOrderThatFit) {
  run_world(2, [](World&) {
    const auto net = on_test_device(std::make_shared<Kinds>());
    const auto sharded = fully_shard(net, {.unit_bytes = 0});
    std::vector<const UnitLayout*> units;
    for (const auto& unit : sharded.state()->units()) units.push_back(&unit->layout());
    std::vector<int> order(units.size());
    std::iota(order.rbegin(), order.rend(), 0);
    const auto sent = [&](size_t i) { return units[i]->nbytes(); };
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{7000}, int64_t{20000}, kAll}) {
      std::vector<size_t> seen;
      const auto buckets = cut_buckets(units, order, bytes);
      for (size_t b = 0; b < buckets.size(); ++b) {
        const auto& bucket = buckets[b];
        int64_t total = 0;
        for (const size_t unit : bucket.units) {
          const UnitLayout& layout = *units[unit];
          total += sent(unit);
          seen.push_back(unit);
          EXPECT_EQ(layout.dtype, units[bucket.units[0]]->dtype);
          EXPECT_TRUE(layout.slots[0].requires_grad || bucket.units.size() == 1);
        }
        EXPECT_TRUE(bucket.units.size() == 1 || (total <= bytes && bytes > 0));
        EXPECT_TRUE(std::is_sorted(bucket.units.rbegin(), bucket.units.rend()));
      }
      std::sort(seen.begin(), seen.end());
      std::vector<size_t> all(units.size());
      std::iota(all.begin(), all.end(), size_t{0});
      EXPECT_EQ(seen, all) << "each once";
      // "half" has another dtype and lies in the middle: float units before and behind it.
      if (bytes < kAll) continue;
      EXPECT_EQ(buckets.size(), 3 + 1) << "and the frozen one";
    }
  });
}

TEST(BucketTraffic, WholeGradientsInFlightAreThoseOfABucketOrTwo) {
  const auto counted = count_step(2, {.unit_bytes = 0, .bucket_bytes = 6000});
  EXPECT_LE(counted.memory.peak_in_flight, 3 * 6000);
}

}  // namespace tessera::testing::bucket_test
