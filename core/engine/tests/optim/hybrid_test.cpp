// Replicated shards: a mesh of a shard dim and a replicate dim.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/counted_job.h"

namespace tessera::testing::hybrid_test {

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;

ShardPlan hybrid(const World& world, int shard_size, ShardPlan plan) {
  const auto process_groups = world.hybrid_process_groups(shard_size);
  plan.process_group = process_groups.shard;
  plan.replicate_group = process_groups.replicate;
  return plan;
}

// Expects of each case the result of one process, and the same on all ranks.
void expect_parity_of_replicas(const TrainingRun& run, int ranks, int shard_size,
                               const std::vector<ShardPlan>& plans) {
  const State expected = train_alone(run, ranks);
  std::vector<std::vector<State>> states(plans.size(), std::vector<State>(ranks));
  run_world(ranks, [&](World& world) {
    for (size_t i = 0; i < plans.size(); ++i)
      states[i][world.rank()] = train_sharded(run, world, hybrid(world, shard_size, plans[i]));
  });
  for (size_t i = 0; i < plans.size(); ++i)
    expect_same_states(states[i], expected, 2e-6,
                       fmt::format("shards over {}, {}", shard_size, describe(ranks, plans[i])));
}

TEST(Hybrid, EveryLevelAndPartitionGivesTheResultOfOneProcessAndOfShardingOverAllRanks) {
  auto run = sgd_run<Mlp>(kWidth, 3, kOut);
  run.steps = 3;
  for (const auto& [ranks, shard_size] :
       {std::pair(4, 2), std::pair(2, 1), std::pair(2, 2), std::pair(3, 1), std::pair(4, 1)}) {
    expect_parity_of_replicas(run, ranks, shard_size, with_each_partition({.unit_bytes = 6000}));
  }
}

// Two replicas of two ranks.
struct Job : CountedJob<Mlp> {
  Job(World& world, const ShardPlan& plan)
      : CountedJob(
            run_by<Mlp, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3), kWidth, 4, kOut),
            world, plan, {}, 2) {}
};

TEST(Hybrid, AStepReduceScattersInsideAndAllReducesShardsAcross) {
  for (const ShardLevel level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
    run_world(4, [&](World& world) {
      Job job(world, {.level = level, .unit_bytes = 6000});
      job.train(0, 3);
      const auto inside = job.count_step(3), across = job.replicate->counts();
      const int64_t units = job.units();
      EXPECT_EQ(inside.reduce_scatter.calls, units);
      EXPECT_EQ(inside.reduce_scatter.bytes_sent, job.bytes() / 2);
      EXPECT_EQ(inside.all_reduce.calls, 1) << "which parameters were used";
      EXPECT_EQ(across.reduce_scatter.calls + across.all_gather.calls + across.broadcast.calls, 0);
      EXPECT_EQ(across.all_reduce.calls, units + 1);
      const int64_t agreement = across.all_reduce.bytes_sent - job.bytes() / 2;
      EXPECT_GT(agreement, 0);
      EXPECT_LT(agreement, 200) << "of a shard, 2 (R - 1) / R is sent";
    });
  }
}

TEST(Hybrid, SeveralBackwardsAddUpWithAndWithoutSynchronizingEach) {
  const auto expected = [] {
    const auto run =
        run_by<Mlp, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3), kWidth, 4, kOut);
    const auto net = run.make_net();
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      for (int i = 0; i < 3; ++i) {
        const Batch batch = global_batch(10 * step + i, kRows, kWidth, kOut);
        for (int rank = 0; rank < 4; ++rank)
          (rank_loss(*net, batch, rank, 4, 10 * step + i) / 4).backward();
      }
      optimizer.step();
    }
    return plain_state(*net);
  }();
  for (const bool sync_each : {true, false}) {
    run_world(4, [&](World& world) {
      Job job(world, {.unit_bytes = 6000});
      for (int step = 0; step < 2; ++step) {
        job.optimizer.zero_grad();
        for (int i = 0; i < 3; ++i) {
          const int batch = 10 * step + i;
          !sync_each&& i < 2 ? job.backward_without_sync(batch) : job.backward(batch);
        }
        job.optimizer.step();
      }
      expect_same_state(job.state(), expected, 2e-6,
                        sync_each ? "each backward reduces" : "the last backward reduces");
    });
  }
}

// Some ranks leave out a branch; another branch is used by none.
struct Branches : Net {
  Branches() {
    for (auto* branch : {&a, &b, &c}) *branch = torch::nn::Linear(kWidth, kWidth);
    register_module("a", a), register_module("b", b), register_module("c", c);
    register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = rank == 3 ? a(x) : b(a(x));
    return head(x);
  }
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr}, head{kWidth, kOut};
};

TEST(Hybrid, ParametersThatSomeOrNoRanksUseAreAgreedOnByAllMeshDims) {
  expect_parity_of_replicas(sgd_run<Branches>(), 4, 2, at_each_level({.unit_bytes = 0}));
}

TEST(Hybrid, ClippingCountsEachElementOnceWithExclusionsAndMissingGradients) {
  const auto make = [] { return seeded(5, [] { return std::make_shared<Branches>(); }); };
  const auto net = make();
  const Batch batch = global_batch(0, kRows, kWidth, kOut);
  for (int rank = 0; rank < 4; ++rank) (rank_loss(*net, batch, rank, 4, 0) / 4).backward();
  const auto square = [](const torch::Tensor& grad) { return grad.pow(2).sum().item<double>(); };
  double all = 0, without_head = 0;
  for (const auto& item : net->named_parameters()) {
    if (!item.value().grad().defined()) continue;
    all += square(item.value().grad());
    if (item.key() != "head.weight") without_head += square(item.value().grad());
  }
  for (const int64_t whole_numel : {int64_t{0}, kWidth, kWidth * kWidth}) {  // "unsliced" ones
    run_world(4, [&](World& world) {
      const auto model = make();
      auto sharded =
          fully_shard(model, hybrid(world, 2, {.unit_bytes = 0, .whole_numel = whole_numel}));
      rank_loss(*model, global_batch(0, kRows, kWidth, kOut), world.rank(), 4, 0).backward();
      EXPECT_NEAR(sharded.clip_grad_norm_(1e9), std::sqrt(all), 1e-5 * std::sqrt(all));
      const auto before = sharded.full_grad("head.weight");
      const double norm =
          sharded.clip_grad_norm_(0.25, ClipOptions{.epsilon = 0, .exclude = {"head.weight"}});
      EXPECT_NEAR(norm, std::sqrt(without_head), 1e-5 * norm);
      EXPECT_TRUE(before.equal(sharded.full_grad("head.weight")));
      const auto clipped = sharded.full_grad("a.weight");
      EXPECT_NEAR(clipped.norm().item<double>() / net->a->weight.grad().norm().item<double>(),
                  0.25 / norm, 1e-5 / norm);
      EXPECT_FALSE(sharded.full_grad("c.weight").defined());
      expect_error([&] { sharded.clip_grad_norm_(1, ClipOptions{.exclude = {"head.wight"}}); },
                   {"'head.wight'", "does not have"});
    });
  }
}

TEST(Hybrid, StartValuesComeFromRankZeroOfTheMesh) {
  run_world(4, [](World& world) {
    const auto net = seeded(world.rank(), [] { return std::make_shared<Mlp>(kWidth, 2, kOut); });
    const auto first = seeded(0, [] { return std::make_shared<Mlp>(kWidth, 2, kOut); });
    auto sharded = fully_shard(net, hybrid(world, 2, {}));
    expect_same_state(sharded.full_state(), plain_state(*first), 0, "rank 0's values");
  });
}

TEST(Hybrid, BuffersAreBroadcastOverBothDims) {
  struct Counter : torch::nn::Module {
    torch::Tensor forward(torch::Tensor x) { return fc(x) + count; }
    torch::nn::Linear fc = register_module("fc", torch::nn::Linear(3, 3));
    torch::Tensor count = register_buffer("count", torch::zeros({2}));
  };
  run_world(4, [](World& world) {
    const auto net = on_test_device(std::make_shared<Counter>());
    net->count.fill_(world.rank() + 1.0);
    auto sharded = fully_shard(net, hybrid(world, 2, {.sync_buffers = true}));
    EXPECT_EQ(net->count[1].item<float>(), 1);
    net->count.fill_(world.rank() + 5.0);
    sharded.begin_forward();
    EXPECT_EQ(net->count[1].item<float>(), 5);
  });
}

TEST(Hybrid, ProcessGroupsThatDoNotFitTogetherAreRefusedOnAllRanks) {
  run_world(4, [](World& world) {
    const auto process_groups = world.hybrid_process_groups(2);
    const auto net = on_test_device(std::make_shared<Mlp>(8, 1, 3));
    const auto before = plain_state(*net);
    // Replicas of neighbours, over which the model is sharded already.
    expect_error(
        [&] {
          fully_shard(net, {.process_group = process_groups.shard,
                            .replicate_group = process_groups.shard});
        },
        {"[fully_shard]", "process group must have the same rank in their"});
    expect_same_state(plain_state(*net), before, 0, "unchanged");
  });
}

TEST(Hybrid, AModelThatDiffersInAnotherReplicaIsNamedOnAllRanks) {
  run_world(4, [](World& world) {
    const auto net = on_test_device(std::make_shared<Mlp>(8, 1, world.rank() == 3 ? 4 : 3));
    expect_error([&] { fully_shard(net, hybrid(world, 2, {})); },
                 {"'head.weight'", "rank 0 has", "rank 3 has"});
  });
}

}  // namespace tessera::testing::hybrid_test
