// `ShardedModelV2`: buffers taken from rank 0, gradients left by zero_grad(), and unwrapping.

#include "dialects/colossalai/tests/colossalai.h"
#include "engine/model/sharded_state.h"

namespace tessera::testing::sharded_model_handover_test {

// Has running statistics of the rows that it has seen.
struct NormTowerImpl : torch::nn::Module {
  NormTowerImpl()
      : first(register_module("first", torch::nn::Linear(6, 13))),
        norm(register_module("norm", torch::nn::BatchNorm1d(13))),
        last(register_module("last", torch::nn::Linear(13, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(norm(first(x)))); }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear last;
};
TORCH_MODULE(NormTower);

TEST(ShardedModelV2, CO_19_BuffersAreRankZerosIfAskedFor) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      for (const bool sync : {false, true}) {
        NormTower net = zero_net<NormTower>(kFloatShards);
        ShardedModelV2<NormTower> model(net, kTensor, {.sync_buffers = sync});
        auto adam = adam_of(net);
        ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
        train_tower(model, optimizer, world, 3);
        model.eval();
        model.forward(tower_batch(0).x);  // with `sync`, first takes rank 0's
        const at::Tensor mean = net->norm->running_mean.clone();
        const at::Tensor first = mean.clone();
        world.process_group()->broadcast(first, 0, {"mean", Channel::kControl})->wait();
        EXPECT_EQ(torch::equal(mean, first), sync || world.rank() == 0);
        // Rank 0's value is the mean of its own rows.
        EXPECT_TRUE(sync || ranks == 1 || world.rank() == 0 || !torch::equal(mean, first));
      }
    });
  }
}

TEST(ShardedModelV2, ZerosOrNoneIsLeftOfGradients) {
  run_world(2, [](World& world) {
    for (const bool set_to_none : {true, false}) {
      Twice net = zero_net<Twice>(kFloatShards);
      ShardedModelV2<Twice> model(net, kTensor);
      auto adam = adam_of(net);
      ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
      train_tower(model, optimizer, world, 1);
      const auto step_of_head = [&] {
        model.zero_grad(set_to_none);
        optimizer.backward(net->head->bias.sum());
        EXPECT_TRUE(optimizer.step());
      };
      const auto before = model.sharded().full_state();
      step_of_head();
      const auto after = model.sharded().full_state();
      // Decay and moments continue where a gradient is zero, and not where there is none.
      EXPECT_EQ(torch::equal(before[0].tensor, after[0].tensor), set_to_none);
    }
  });
}

TEST(ShardedModelV2, IsUnwrappedToAnOrdinaryModule) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      for (const auto& strategy : {kTensor, kBucket}) {
        Tower net = zero_net<Tower>(kFloatShards, strategy), plain = eager_net<Tower>();
        ShardedModelV2<Tower> model(net, strategy);
        auto adam = adam_of(net), alone = adam_of(plain);
        ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
        train_tower(model, optimizer, world, 2);
        expect_error([&] { model.unwrap(); }, {"its unwrap() first"});
        optimizer.unwrap();
        model.unwrap();
        for (const at::Tensor& param : net->parameters()) {
          EXPECT_EQ(unit_of(param), nullptr);
          EXPECT_EQ(param.storage().nbytes(), param.nbytes());
        }
        train_tower_alone(*net, adam, ranks, 2);
        // The same steps in one process.
        train_tower_alone(*plain, alone, ranks, 2);
        train_tower_alone(*plain, alone, ranks, 2);
        expect_same_state(plain_state(*net), plain_state(*plain), 1e-5, "went on alone");
        expect_error([&] { model.forward(tower_batch(0).x); }, {"was unwrapped"});
      }
    });
  }
}

}  // namespace tessera::testing::sharded_model_handover_test
