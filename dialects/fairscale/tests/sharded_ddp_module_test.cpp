// `ShardedDataParallel` as a module: its mode, its conversions, its `zero_grad()`, by the ids of
// its behaviours.

#include "dialects/fairscale/tests/fairscale.h"

namespace tessera::testing::sharded_ddp_module_test {

const SGDOptions kSgd = SGDOptions(0.1).momentum(0.9);

// One layer is used in every second step only.
struct SkippingNetImpl : torch::nn::Module {
  SkippingNetImpl()
      : first(register_module("first", torch::nn::Linear(6, 9))),
        second(register_module("second", torch::nn::Linear(9, 9))),
        last(register_module("last", torch::nn::Linear(9, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = torch::tanh(first(x));
    return last(calls++ % 2 == 0 ? torch::tanh(second(y)) : y);
  }
  int calls = 0;
  torch::nn::Linear first, second, last;
};
TORCH_MODULE(SkippingNet);

// As in one process: momentum and decay continue with a gradient of zeros, not without a gradient.
TEST(ShardedDdp, FS_06_WhatWasSetToZeroIsSteppedWithZeros) {
  const SGDOptions options = SGDOptions(0.1).momentum(0.9).weight_decay(0.1);
  for (const int ranks : {1, 2, 3}) {
    for (const bool set_to_none : {false, true}) {
      SkippingNet plain = make_net<SkippingNet>();
      SGD alone(plain->parameters(), options);
      for (int step = 0; step < 4; ++step) {
        plain->zero_grad(set_to_none);
        at::Tensor loss = on_test_device(torch::zeros({}));
        const int calls = plain->calls;
        for (int rank = 0; rank < ranks; ++rank) {
          plain->calls = calls;
          loss = loss + loss_of(*plain, step, rank, ranks) / ranks;
        }
        loss.backward();
        alone.step();
      }
      const auto expected = plain_state(*plain);
      run_world(ranks, [&](World& world) {
        SkippingNet net = make_net<SkippingNet>();
        OSS<SGD> optimizer(net->parameters(), options);
        ShardedDataParallel<SkippingNet> model(net, optimizer, {.reduce_buffer_size = 0});
        for (int step = 0; step < 4; ++step) {
          set_to_none ? model.zero_grad(true) : model.zero_grad();
          loss_of(model, step, world.rank(), ranks).backward();
          optimizer.step();
        }
        expect_same_state(plain_state(*net), expected, 2e-6,
                          std::to_string(ranks) + (set_to_none ? " ranks, none" : " ranks, zero"));
        expect_replicas(world, *net);
      });
    }
  }
}

// Records how it was asked to move.
struct MovedNetImpl : PlainNetImpl {
  using torch::nn::Module::to;
  void to(torch::Device device, bool non_blocking = false) override {
    asked.push_back(non_blocking);
    PlainNetImpl::to(device, non_blocking);
  }
  std::vector<bool> asked;
};
TORCH_MODULE(MovedNet);

TEST(ShardedDdp, FS_18_ToMayBeNonBlocking) {
  run_world(2, [](World& world) {
    MovedNet net = make_net<MovedNet>();
    net->asked.clear();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<MovedNet> model(net, optimizer);
    const at::Device own = test_device();
    model.to(own).to(own, /*non_blocking=*/true).to(own, at::kDouble, /*non_blocking=*/true);
    model.to(at::kFloat, /*non_blocking=*/true).to(own, at::kFloat);
    EXPECT_EQ(net->asked, (std::vector<bool>{false, true, true, false}));
    train(model, optimizer, world, 1);
    expect_replicas(world, *net);
  });
}

TEST(ShardedDdp, FS_19_TheModeIsTheModules) {
  run_world(2, [](World&) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    EXPECT_TRUE(model.training());
    model.eval();
    EXPECT_FALSE(model.training());
    EXPECT_FALSE(net->is_training());
    net->train();
    EXPECT_TRUE(model.training());
  });
}

}  // namespace tessera::testing::sharded_ddp_module_test
