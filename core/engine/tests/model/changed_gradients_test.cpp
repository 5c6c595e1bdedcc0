// Gradients that a program reads and changes, whole or one by one, before the optimizer steps.
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "support/models.h"

namespace tessera::testing::changed_gradients_test {

constexpr double kRate = 0.125;

// The first weight is stored by columns.
std::shared_ptr<Mlp> make_mlp() {
  const auto net = seeded(7, [] { return std::make_shared<Mlp>(37, 2, 5); });
  const at::Tensor weight = net->fcs[0]->weight;
  weight.set_data(weight.detach().t().contiguous().t());
  return net;
}

void on_sizes(const std::function<void(World&, const ShardPlan&)>& f) {
  on_worlds({1, 2, 3}, with_each_partition({.unit_bytes = 6000}), f);
}

void backward(Mlp& net, World& world, int step) {
  rank_loss(net, global_batch(step, 12, 37, 5), world.rank(), world.size(), step).backward();
}

torch::optim::SGD make_sgd(Mlp& net) {
  return torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(kRate).weight_decay(0.5));
}

// The state of one process that changes the gradient of a batch, and steps.
std::vector<NamedTensor> stepped_alone(int size, const std::function<void(Mlp&)>& change) {
  const auto net = make_mlp();
  auto optimizer = make_sgd(*net);
  for (int rank = 0; rank < size; ++rank)
    (rank_loss(*net, global_batch(0, 12, 37, 5), rank, size, 0) / size).backward();
  change(*net);
  optimizer.step();
  return plain_state(*net);
}

TEST(ChangedGradients, AreWholeOnesThatAreSet) {
  on_sizes([](World& world, const ShardPlan& plan) {
    const auto net = make_mlp();
    auto sharded = fully_shard(net, plan);
    auto inner = make_sgd(*net);
    ShardedOptimizer optimizer(sharded, inner);
    const at::Tensor weight = net->fcs[0]->weight;
    expect_error(
        [&] {
          sharded.set_full_grad(weight, torch::zeros({37, 37}));
        },
        {"[set_full_grad]", "'fc0.weight'", "no reduced gradient"});
    backward(*net, world, 0);
    EXPECT_TRUE(sharded.has_reduced_grad(weight));
    EXPECT_EQ(sharded.grad_dtype(weight), torch::kFloat);
    sharded.set_full_grad(weight, std::get<0>(sharded.full_grad(weight).sort()));
    sharded.set_full_grad(net->head->bias, on_test_device(torch::full({5}, 0.5)));
    expect_error([&] { sharded.set_full_grad(weight, torch::zeros({5})); },
                 {"[set_full_grad]", "'fc0.weight'", "[37, 37]", "[5]"});
    optimizer.step();
    const auto change = [](Mlp& alone) {
      const at::Tensor own = alone.fcs[0]->weight;
      own.mutable_grad() = std::get<0>(own.grad().sort());
      alone.head->bias.mutable_grad() = on_test_device(torch::full({5}, 0.5));
    };
    expect_same_state(sharded.full_state(), stepped_alone(world.size(), change), 2e-6, "sorted");
  });
}

// Zeros are stepped: the parameter decays.
TEST(ChangedGradients, AreZerosOfOneParameter) {
  on_sizes([](World& world, const ShardPlan& plan) {
    for (const bool set_to_none : {false, true}) {
      const auto net = make_mlp();
      auto sharded = fully_shard(net, plan);
      auto inner = make_sgd(*net);
      ShardedOptimizer optimizer(sharded, inner);
      const at::Tensor weight = net->fcs[0]->weight;
      backward(*net, world, 0);
      sharded.zero_grad(weight, set_to_none);
      EXPECT_EQ(sharded.has_grad(weight), !set_to_none);
      EXPECT_EQ(sharded.full_grad(weight).defined(), !set_to_none);
      EXPECT_TRUE(sharded.has_reduced_grad(net->fcs[0]->bias));
      optimizer.step();
      const auto change = [&](Mlp& alone) {
        at::Tensor& grad = alone.fcs[0]->weight.mutable_grad();
        set_to_none ? grad.reset() : void(grad.zero_());
      };
      expect_same_state(sharded.full_state(), stepped_alone(world.size(), change), 2e-6, "zeros");
    }
  });
}

TEST(ChangedGradients, AreZerosAfterZeroGradAndUndefinedUnderNoSync) {
  on_sizes([](World& world, const ShardPlan& plan) {
    const auto net = make_mlp();
    auto sharded = fully_shard(net, plan);
    const at::Tensor weight = net->fcs[0]->weight;
    backward(*net, world, 0);
    sharded.zero_grad(/*set_to_none=*/false);
    EXPECT_FALSE(sharded.has_reduced_grad(weight));
    EXPECT_TRUE(sharded.full_grad(weight).eq(0).all().item<bool>());
    {
      const auto local = sharded.no_sync();
      backward(*net, world, 0);
    }
    EXPECT_TRUE(sharded.has_grad(weight));
    EXPECT_FALSE(sharded.full_grad(weight).defined());
    backward(*net, world, 1);
    EXPECT_GT(sharded.full_grad(weight).norm().item<double>(), 0);
  });
}

// Tensors like those of an optimizer's state.
TEST(Cut, PartsMakeTheWholeAgain) {
  on_sizes([](World& world, const ShardPlan& plan) {
    for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kParameters}) {
      ShardPlan of_level = plan;
      of_level.level = level;
      const auto net = make_mlp();
      auto sharded = fully_shard(net, of_level);
      int64_t own = 0, total = 0;
      for (const at::Tensor& param : net->parameters()) {
        const at::Tensor whole =
            on_test_device(torch::arange(param.numel(), torch::kDouble).view(param.sizes()));
        const at::Tensor part = sharded.cut(param, whole);
        EXPECT_EQ(part.scalar_type(), torch::kDouble);
        EXPECT_TRUE(torch::equal(sharded.gather(param, part), whole)) << world.rank();
        own += part.numel();
        total += param.numel();
        expect_error([&] { sharded.cut(param, torch::zeros({3, 3})); }, {"[cut]", "[3, 3]"});
        expect_error([&] { sharded.gather(param, torch::zeros({param.numel() + 1})); },
                     {"[gather]", "elements of '"});
      }
      int64_t of_all_ranks = 0;
      for (const auto& text : all_gather_bytes(*world.process_group(), std::to_string(own),
                                               {"elements of parts", Channel::kControl}))
        of_all_ranks += std::stoll(text);
      const int64_t copies = level == ShardLevel::kNone ? world.size() : 1;
      EXPECT_EQ(of_all_ranks, copies * total);
    }
  });
}

TEST(FullValue, HasTheDigitsOfTheMasterCopy) {
  on_sizes([](World& world, const ShardPlan& plan) {
    ShardPlan narrow = plan;
    narrow.precision.param_dtype = torch::kBFloat16;
    const auto net = make_mlp();
    auto sharded = fully_shard(net, narrow);
    for (const auto& [name, value] : plain_state(*make_mlp())) {
      const at::Tensor param = net->named_parameters()[name];
      EXPECT_EQ(param.scalar_type(), torch::kBFloat16);
      const at::Tensor whole = sharded.full_value(param);
      EXPECT_EQ(whole.scalar_type(), torch::kFloat);
      EXPECT_TRUE(whole.equal(on_test_device(value))) << name;
    }
    EXPECT_TRUE(sharded.any_rank(world.rank() == world.size() - 1));
    EXPECT_FALSE(sharded.any_rank(false));
  });
}

TEST(AnyRank, IsOneOfAnyReplica) {
  run_world(4, [](World& world) {
    const auto groups = world.hybrid_process_groups(2);
    const auto net = make_mlp();
    auto sharded =
        fully_shard(net, {.process_group = groups.shard, .replicate_group = groups.replicate});
    for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(sharded.any_rank(world.rank() == rank));
    EXPECT_FALSE(sharded.any_rank(false));
  });
}

}  // namespace tessera::testing::changed_gradients_test
