// Training with checkpoints on sharded models: bit-identical to training without them.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/engine/activation_checkpoint.h>

#include "engine/model/sharded_state.h"
#include "support/autocast.h"
#include "support/models.h"
#include "support/norm_mlp.h"

namespace tessera::testing::recomputed_training_test {

using at::Tensor;

constexpr int kSteps = 3;
constexpr int64_t kBlockBytes = (2 * 37 + 37 * 74 + 74 + 74 * 37 + 37) * 4;

enum class Use { kNever, kEachBlock, kNested };

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        up(register_module("up", nn::Linear(width, 2 * width))),
        down(register_module("down", nn::Linear(2 * width, width))) {}
  Tensor forward(const Tensor& x) {
    return x + torch::dropout(down(torch::gelu(up(norm(x)))), 0.2, is_training());
  }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(Block);

// The second block is also the last one; odd ranks leave out the third in odd steps.
struct Blocks : Net {
  explicit Blocks(Use use) : use(use) {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module(fmt::format("block{}", i), Block(37)));
    head = register_module("head", nn::Linear(37, 5));
  }
  Tensor forward(Tensor x) override {
    x = run({0, 1}, x);
    if (rank % 2 == 0 || step % 2 == 0) x = run({2}, x);
    return head(run({3, 1}, x));
  }
  Tensor run(const std::vector<int>& group, Tensor x) {
    const auto each = [this, group](Tensor x) {
      for (const int i : group) x = use == Use::kNever ? blocks[i](x) : checkpoint(blocks[i], x);
      return x;
    };
    return use == Use::kNested ? checkpoint(each, x) : each(x);
  }
  Use use;
  std::vector<Block> blocks;
  nn::Linear head{nullptr};
};

struct Trained {
  std::vector<NamedTensor> state;
  std::vector<Tensor> gradients;         // of some parameters, after each backward
  std::vector<CollectiveCounts> counts;  // of each step's last forward and backward
};

struct Case {
  ShardPlan plan;
  int ranks = 1;
  std::optional<at::ScalarType> autocast = std::nullopt;
  int unsynced = 0;  // backwards of a step that only accumulate
  bool arena = false;
};

// On a rank, manual_seed() leaves the generators of devices as they are.
void seed_all(uint64_t seed) {
  manual_seed(seed);
  if (tests_on_host()) return;
  at::Generator generator = at::globalContext().defaultGenerator(test_device());
  generator.set_current_seed(seed);
}

Trained train(const Case& which, Use use, World& world) {
  const auto net = seeded(7, [&] { return std::make_shared<Blocks>(use); });
  torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto counter = which.arena ? nullptr : counting_process_group(world.process_group());
  ShardPlan plan = which.plan;
  if (counter) plan.process_group = counter;
  auto sharded = fully_shard(net, plan);
  ShardedOptimizer optimizer(sharded, inner, {.fused = false});
  seed_all(20 + world.rank());
  Trained trained;
  const auto backward = [&](int step, int batch) {
    const auto loss = [&] {
      const Autocast autocast(which.autocast);
      // Ranks as threads share the cache of cast parameters, and drop each other's entries: a
      // parameter that is used twice would be cast once or twice.
      at::autocast::set_autocast_cache_enabled(false);
      return rank_loss(*net, global_batch(batch, 12, 37, 5), world.rank(), world.size(), step);
    }();
    loss.backward();
  };
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int i = 0; i < which.unsynced; ++i) {
      const auto guard = sharded.no_sync();
      backward(step, step * 10 + i);
    }
    if (counter) counter->reset_counts();
    backward(step, step * 10 + 9);
    if (counter) trained.counts.push_back(counter->counts());
    for (const char* name : {"block0.up.weight", "block1.down.bias", "block3.norm.weight"})
      trained.gradients.push_back(sharded.full_grad(name).clone());
    optimizer.step();
  }
  trained.state = sharded.full_state();
  return trained;
}

// Expects that checkpoints add no reduction.
void expect_same_counts(const std::vector<CollectiveCounts>& actual,
                        const std::vector<CollectiveCounts>& expected, const std::string& name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].reduce_scatter.calls, expected[i].reduce_scatter.calls) << name;
    EXPECT_EQ(actual[i].reduce_scatter.bytes_sent, expected[i].reduce_scatter.bytes_sent) << name;
    // In the first step, ranks ask for units that registration order does not expect.
    if (i == 0) continue;
    EXPECT_EQ(actual[i].all_reduce.calls, expected[i].all_reduce.calls) << name;
  }
}

void expect_same_training(const Case& which, const std::string& what) {
  const auto on_rank = [&](World& world) {
    const Trained expected = train(which, Use::kNever, world);
    for (const Use use : {Use::kEachBlock, Use::kNested}) {
      const Trained trained = train(which, use, world);
      const std::string name =
          fmt::format("{}, {} ranks, level {}, use {}", what, which.ranks,
                      static_cast<int>(which.plan.level), static_cast<int>(use));
      expect_same_state(trained.state, expected.state, 0, name);
      ASSERT_EQ(trained.gradients.size(), expected.gradients.size()) << name;
      for (size_t i = 0; i < expected.gradients.size(); ++i)
        EXPECT_TRUE(trained.gradients[i].equal(expected.gradients[i])) << name << ", " << i;
      expect_same_counts(trained.counts, expected.counts, name);
    }
  };
  which.arena ? run_arena(which.ranks, on_rank) : run_world(which.ranks, on_rank);
}

TEST(RecomputedTraining, IsTheSameAtEveryLevel) {
  for (const ShardLevel level : kAllLevels)
    expect_same_training({{.level = level, .unit_bytes = 12000}, 2}, "small units");
}

TEST(RecomputedTraining, IsTheSameOnAnyNumberOfRanksSlow) {
  for (const int ranks : {1, 3}) {
    for (const ShardLevel level : kAllLevels) {
      expect_same_training({{.level = level, .unit_bytes = 6000}, ranks}, "small units");
      expect_same_training({{.level = level, .unit_bytes = kBlockBytes}, ranks}, "block by block");
      expect_same_training({{.level = level}, ranks}, "one unit");
    }
  }
}

TEST(RecomputedTraining, IsTheSameWithWholeParameters) {
  expect_same_training(
      {{.level = ShardLevel::kGradients, .partition = Partition::kWholeParam, .unit_bytes = 6000},
       3},
      "whole parameters");
}

constexpr ShardLevel kParameters = ShardLevel::kParameters;

TEST(RecomputedTraining, IsTheSameWithAccumulation) {
  expect_same_training(
      {.plan = {.level = kParameters, .unit_bytes = 6000}, .ranks = 2, .unsynced = 2}, "no_sync");
}

TEST(RecomputedTraining, IsTheSameWithAutocast) {
  expect_same_training(
      {.plan = {.level = kParameters, .unit_bytes = 6000}, .ranks = 2, .autocast = at::kBFloat16},
      "autocast");
}

TEST(RecomputedTraining, IsTheSameWithAccumulationUnderAutocastAtEveryLevelSlow) {
  for (const ShardLevel level : kAllLevels) {
    expect_same_training({.plan = {.level = level, .unit_bytes = 6000},
                          .ranks = 3,
                          .autocast = at::kBFloat16,
                          .unsynced = 1},
                         "no_sync and autocast");
  }
}

// The second run of a block gathers the weights for its backward, and reuses those still gathered.
TEST(RecomputedTraining, GathersNoMoreWhereABlockIsAUnit) {
  run_world(2, [](World& world) {
    const Case which{{.level = kParameters, .unit_bytes = kBlockBytes}, 2};
    const auto expected = train(which, Use::kNever, world).counts;
    const auto actual = train(which, Use::kEachBlock, world).counts;
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LE(actual[i].all_gather.calls, expected[i].all_gather.calls) << "step " << i;
    }
  });
}

TEST(RecomputedTraining, IsTheSameOverTheArena) {
  for (const int ranks : {1, 2, 3}) {
    for (const ShardLevel level : kAllLevels) {
      expect_same_training(
          {.plan = {.level = level, .unit_bytes = 6000}, .ranks = ranks, .arena = true}, "arena");
    }
  }
}

// Trains with dropout, for which every rank draws the numbers of one process.
std::vector<Tensor> train_dist(World&, ShardLevel level, bool use) {
  const auto mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
  NormMlp mlp = make_norm_mlp();
  shard_columns_then_rows(mlp, mesh, {Replicate{}});
  torch::optim::AdamW inner(mlp->parameters(), torch::optim::AdamWOptions(0.01));
  auto model = fully_shard(mlp, {.level = level, .unit_bytes = 200, .mesh_dim = 0});
  ShardedOptimizer optimizer(model, inner);
  seed_all(5);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto batch =
        on_test_device(torch::randn({8, 6}, at::make_generator<at::CPUGeneratorImpl>(step)));
    const auto x = distribute(batch, mesh, {Shard{0}, Replicate{}});
    auto block = [mlp](const Tensor& x) mutable { return torch::dropout(mlp(x), 0.4, true); };
    const auto run = [&](const Tensor& x) { return use ? checkpoint(block, x) : block(x); };
    run(run(x)).square().mean().backward();
    optimizer.step();
  }
  std::vector<Tensor> state;
  for (const NamedTensor& parameter : model.full_state()) state.push_back(parameter.tensor);
  state.push_back(torch::rand({3}, test_device()));
  return state;
}

TEST(RecomputedTraining, IsTheSameWithDistTensors) {
  for (const ShardLevel level : kAllLevels) {
    run_world(4, [&](World& world) {
      const auto expected = train_dist(world, level, false);
      const auto trained = train_dist(world, level, true);
      ASSERT_EQ(trained.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(trained[i].equal(expected[i])) << i;
    });
  }
}

}  // namespace tessera::testing::recomputed_training_test
