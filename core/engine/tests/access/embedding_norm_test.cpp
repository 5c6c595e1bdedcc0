// Embeddings that renormalize the rows they look up (`max_norm`): a forward that writes.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>

#include <numeric>

#include "support/error_of.h"
#include "support/models.h"

namespace tessera::testing::embedding_norm_test {

constexpr int64_t kRows = 40;
constexpr double kMaxNorm = 0.7;

torch::Tensor words_of(const torch::Tensor& x) { return (x.abs() * 17).to(torch::kLong) % kRows; }

struct Words : Net {
  Words() {
    words = register_module(
        "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(kRows, 6).max_norm(kMaxNorm)));
    bag = register_module("bag", torch::nn::EmbeddingBag(
                                     torch::nn::EmbeddingBagOptions(kRows, 6).max_norm(kMaxNorm)));
    head = register_module("head", torch::nn::Linear(12, 5));
  }
  torch::Tensor forward(torch::Tensor x) override {
    const torch::Tensor indices = words_of(x.narrow(1, 0, 4));
    return head(torch::cat({words(indices).mean(1), bag(indices)}, 1));
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
  torch::nn::Linear head{nullptr};
};

TEST(EmbeddingNorm, RowsThatAnyRankLooksUpAreRenormalizedOnAll) {
  const TrainingRun run = sgd_run<Words>();
  const auto start = plain_state(*run.make_net());
  EXPECT_GT(start[0].tensor.norm(2, 1).min().item<double>(), kMaxNorm);
  std::vector<ShardPlan> plans = at_each_level({.unit_bytes = 600});
  for (ShardPlan plan : at_each_level({.unit_bytes = 600})) {
    plan.precision.gather_dtype = torch::kBFloat16;
    plans.push_back(plan);
  }
  for (const int ranks : {1, 2, 3, 4}) {
    const State expected = train_alone(run, ranks);
    for (const Transport transport : kTransports) {
      const auto compare = [&](World& world, const ShardPlan& plan) {
        const double tolerance = plan.precision.gather_dtype ? 0.02 : tolerance_of(ranks);
        expect_same_state(train_sharded(run, world, plan), expected, tolerance, "renormalized");
      };
      on_worlds({ranks}, plans, compare, transport);
    }
  }
}

TEST(EmbeddingNorm, RowsAreThoseOfAllReplicas) {
  const TrainingRun run = sgd_run<Words>();
  const auto expected = train_alone(run, 4);
  run_world(4, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::over_world({2, 2});
    const ShardPlan plan{.process_group = mesh.process_group(1),
                         .replicate_group = mesh.process_group(0)};
    expect_same_state(train_sharded(run, world, plan), expected, 1e-6, "replicas");
  });
}

// Trains the rows with the words of each rank of the first mesh dim.
torch::Tensor train_dist(World& world, const DeviceMesh& mesh, const Placements& placements,
                         const ShardPlan& plan, bool distributes) {
  const auto net = seeded(7, [] { return std::make_shared<Words>(); });
  distribute_(net->words->weight, mesh, placements);
  torch::optim::SGD inner({net->words->weight}, torch::optim::SGDOptions(0.1));
  auto sharded = fully_shard({{"words", net->words->weight}}, {}, plan);
  ShardedOptimizer optimizer(sharded, inner, {.fused = false});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    torch::Tensor words = words_of(global_batch(step, 4, 37, 5).x.narrow(1, 0, 4));
    if (distributes) {
      words = distribute(words, mesh, {Shard{0}, Replicate{}});
    } else {
      words = rows_of(words, world.rank() / 2, 2);
    }
    net->words(words).square().mean().backward();
    optimizer.step();
  }
  return sharded.full_state()[0].tensor.cpu();
}

torch::Tensor train_rows_alone() {
  const auto net = seeded(7, [] { return std::make_shared<Words>(); });
  torch::optim::SGD inner({net->words->weight}, torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    inner.zero_grad();
    net->words(words_of(global_batch(step, 4, 37, 5).x.narrow(1, 0, 4))).square().mean().backward();
    inner.step();
  }
  return net->words->weight.detach().cpu();
}

TEST(EmbeddingNorm, RowsOfDistTensorsAreThoseOfAllRanksOrAreRefused) {
  const auto expected = train_rows_alone();
  run_world(4, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
    for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kParameters}) {
      const ShardPlan apart{.level = level, .process_group = mesh.process_group(0)};
      const ShardPlan along{.level = level, .mesh_dim = 0};
      EXPECT_TRUE(
          torch::allclose(train_dist(world, mesh.sub_mesh("tp"), {Replicate{}}, apart, false),
                          expected, 1e-5, 1e-6));
      for (const Placement& cut :
           {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})})
        EXPECT_TRUE(torch::allclose(train_dist(world, mesh, {Replicate{}, cut}, along, true),
                                    expected, 1e-5, 1e-6));
      const std::string error = error_of<c10::NotImplementedError>(
          [&] { train_dist(world, mesh.sub_mesh("tp"), {Shard{0}}, apart, false); });
      expect_contains(error, {"max_norm"});
    }
  });
}

TEST(EmbeddingNorm, DistTensorsRenormalizeTheRowsOfAllParts) {
  const torch::Tensor start = torch::randn({kRows, 6}, at::detail::createCPUGenerator(1));
  const torch::Tensor words = words_of(global_batch(1, 6, 37, 5).x).cpu();
  torch::Tensor expected = start.clone();
  torch::embedding_renorm_(expected, words, kMaxNorm, 2);
  run_world(2, [&](World&) {
    const DeviceMesh mesh = DeviceMesh::over_world();
    for (const Placement& weight :
         {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
      torch::Tensor rows = distribute(on_test_device(start.clone()), mesh, {weight});
      torch::embedding_renorm_(rows, distribute(on_test_device(words), mesh, {Shard{0}}), kMaxNorm,
                               2);
      EXPECT_TRUE(torch::allclose(full_tensor(rows).cpu(), expected, 1e-6, 1e-7));
    }
  });
}

// The ranks wait for each other then, and the one that wrote says so.
TEST(EmbeddingNorm, AWriteOfOneRankIsNamedInTheErrorOfAll) {
  TESSERA_ON_HOST_ONLY("the ranks of an accelerator queue their collectives, and do not wait");
  for (const Transport transport : kTransports) {
    for (const ShardLevel level : kAllLevels) {
      EXPECT_ANY_THROW(run_over(
          transport, 2,
          [&](World& world) {
            const auto net = seeded(7, [] { return std::make_shared<Words>(); });
            auto sharded = fully_shard(net, {.level = level});
            try {
              const torch::Tensor x = global_batch(0, 4, 37, 5).x;
              if (world.rank() == 1) {
                torch::NoGradGuard no_grad;
                net->head->weight.clamp_(-0.1, 0.1);
              }
              net->head(torch::cat({x, x}, 1).narrow(1, 0, 12)).sum().backward();
            } catch (const c10::Error& error) {
              expect_contains(error.what(), {"(an operator wrote to it)"});
              throw;
            }
          },
          std::chrono::seconds(2)));
    }
  }
}

struct FrozenNorm : torch::nn::Module {
  torch::Tensor forward(bool trains) {
    return torch::batch_norm(torch::arange(20.).reshape({4, 5}), weight, {}, mean, var, trains, 0.1,
                             1e-5, /*cudnn_enabled=*/false);
  }
  torch::Tensor weight = register_parameter("weight", torch::ones({5}));
  torch::Tensor mean = register_parameter("mean", torch::zeros({5}), false);
  torch::Tensor var = register_parameter("var", torch::ones({5}), false);
};

// LibTorch's schemas don't tell that the operator writes to them.
TEST(EmbeddingNorm, RunningStatisticsThatAreParametersAreReadButNotWritten) {
  TESSERA_ON_HOST_ONLY("the model is made in host memory");
  const auto use = [](World&, const ShardPlan& plan) {
    const auto net = std::make_shared<FrozenNorm>();
    auto sharded = fully_shard(net, plan);
    EXPECT_TRUE(torch::equal(net->forward(false), FrozenNorm().forward(false)));
    const std::string error = error_of<c10::NotImplementedError>([&] { net->forward(true); });
    expect_contains(error, {"running statistics"});
    net->forward(false).sum().backward();
  };
  for (const Transport transport : kTransports) on_worlds({2}, at_each_level(), use, transport);
}

}  // namespace tessera::testing::embedding_norm_test
