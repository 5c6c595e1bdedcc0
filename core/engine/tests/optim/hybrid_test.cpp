// Replicated shards: a mesh of a shard dim and a replicate dim.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace hybrid_test {

using namespace testing;

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;

ShardPlan hybrid(const World& world, int shard_size, ShardPlan plan) {
  const auto process_groups = world.hybrid_process_groups(shard_size);
  plan.process_group = process_groups.shard;
  plan.replicate_group = process_groups.replicate;
  return plan;
}

// Expects of each case the result of one process, and the same on all ranks.
void expect_parity_of_replicas(const TrainingRun& run, int ranks, int shard_size,
                               const std::vector<ParityCase>& cases) {
  const auto expected = train_alone(run, ranks);
  std::vector<std::vector<std::vector<NamedTensor>>> states(
      cases.size(), std::vector<std::vector<NamedTensor>>(ranks));
  run_world(ranks, [&](World& world) {
    for (size_t i = 0; i < cases.size(); ++i) {
      states[i][world.rank()] = train_sharded(run, world, hybrid(world, shard_size, cases[i].plan));
    }
  });
  for (size_t i = 0; i < cases.size(); ++i) {
    for (const auto& state : states[i])
      expect_same_state(state, states[i][0], 0, cases[i].what + ", replicas");
    expect_same_state(states[i][0], expected, 2e-6, cases[i].what);
  }
}

TEST(Hybrid, EveryLevelAndPartitionGivesTheResultOfOneProcessAndOfShardingOverAllRanks) {
  auto run = sgd_run<Mlp>(kWidth, 3, kOut);
  run.steps = 3;
  for (const auto& [ranks, shard_size] :
       {std::pair(4, 2), std::pair(2, 1), std::pair(2, 2), std::pair(3, 1), std::pair(4, 1)}) {
    std::vector<ParityCase> cases;
    for (const ShardLevel level : kAllLevels) {
      for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
        const ShardPlan plan{.level = level, .partition = partition, .unit_bytes = 6000};
        cases.push_back({plan, fmt::format("{} ranks, shards over {}, level {}, partition {}",
                                           ranks, shard_size, int(level), int(partition))});
      }
    }
    expect_parity_of_replicas(run, ranks, shard_size, cases);
  }
}

// Two replicas of two ranks, behind a counter for each dim.
struct Job {
  Job(World& world, ShardPlan plan, std::shared_ptr<Mlp> model = nullptr) : world(world) {
    const auto process_groups = world.hybrid_process_groups(2);
    plan.process_group = shard = counting_process_group(process_groups.shard);
    plan.replicate_group = replicate = counting_process_group(process_groups.replicate);
    net = model ? model : seeded(3, [] { return std::make_shared<Mlp>(kWidth, 4, kOut); });
    inner =
        std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-3));
    sharded = std::make_unique<Sharded<Mlp>>(fully_shard(net, plan));
    optimizer = std::make_unique<ShardedOptimizer>(*sharded, *inner);
  }
  void backward(int i) {
    const Batch batch = global_batch(i, kRows, kWidth, kOut);
    rank_loss(*net, batch, world.rank(), world.size(), i).backward();
  }
  void step(int i) {
    optimizer->zero_grad();
    backward(i);
    optimizer->step();
  }
  int64_t bytes() const {
    int64_t total = 0;
    for (const auto& unit : sharded->state()->units()) total += unit->layout().nbytes();
    return total;
  }

  World& world;
  std::shared_ptr<CountingProcessGroup> shard, replicate;
  std::shared_ptr<Mlp> net;
  std::unique_ptr<torch::optim::AdamW> inner;
  std::unique_ptr<Sharded<Mlp>> sharded;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

TEST(Hybrid, AStepReduceScattersInsideAndAllReducesShardsAcross) {
  for (const ShardLevel level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
    run_world(4, [&](World& world) {
      Job job(world, {.level = level, .unit_bytes = 6000});
      for (int i = 0; i < 3; ++i) job.step(i);
      job.shard->reset_counts();
      job.replicate->reset_counts();
      job.step(3);
      const auto inside = job.shard->counts(), across = job.replicate->counts();
      const auto units = static_cast<int64_t>(job.sharded->state()->units().size());
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
    const auto run = sgd_run<Mlp>(kWidth, 4, kOut);
    const auto net = seeded(3, [] { return std::make_shared<Mlp>(kWidth, 4, kOut); });
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      for (int i = 0; i < 3; ++i) {
        const Batch batch = global_batch(10 * step + i, kRows, kWidth, kOut);
        for (int rank = 0; rank < 4; ++rank) (rank_loss(*net, batch, rank, 4, i) / 4).backward();
      }
      optimizer.step();
    }
    return plain_state(*net);
  }();
  for (const bool sync_each : {true, false}) {
    run_world(4, [&](World& world) {
      Job job(world, {.unit_bytes = 6000});
      for (int step = 0; step < 2; ++step) {
        job.optimizer->zero_grad();
        for (int i = 0; i < 3; ++i) {
          std::optional<ShardedModule::NoSync> local;
          if (!sync_each && i < 2) local.emplace(job.sharded->state());
          job.backward(10 * step + i);
        }
        job.optimizer->step();
      }
      expect_same_state(job.sharded->full_state(), expected, 2e-6,
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
  const auto run = sgd_run<Branches>();
  std::vector<ParityCase> cases;
  for (const ShardLevel level : kAllLevels)
    cases.push_back(
        {{.level = level, .unit_bytes = 0}, fmt::format("branches, level {}", int(level))});
  expect_parity_of_replicas(run, 4, 2, cases);
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

}  // namespace hybrid_test
}  // namespace tessera
