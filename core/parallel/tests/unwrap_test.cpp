// `unwrap(module)`: modules of DistTensors, sharded or not, as ordinary ones.
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include "support/models.h"

namespace tessera::testing::unwrap_test {

using torch::nn::Linear;

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : up(register_module("up", Linear(6, 8))),
        down(register_module("down", Linear(8, 6))),
        scale(register_buffer("scale", torch::full({6}, 0.5))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(up(x))) * scale; }
  Linear up, down;
  at::Tensor scale;
};
TORCH_MODULE(Block);

Block make_block() {
  return seeded(3, [] { return Block(); });
}

// The first layer by columns, the second by rows.
void place(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh) {
  auto* const linear = module.as<torch::nn::LinearImpl>();
  if (!linear) return;
  distribute_(linear->weight, mesh, {Shard(name == "up" ? 0 : 1)});
  if (name == "up") distribute_(linear->bias, mesh, {Shard(0)});
}

void expect_ordinary(torch::nn::Module& module) {
  for (const at::Tensor& param : module.parameters()) {
    EXPECT_FALSE(is_dist(param));
    EXPECT_TRUE(param.requires_grad());
    EXPECT_FALSE(param.grad().defined());
    EXPECT_EQ(param.storage().nbytes(), param.nbytes());
  }
  for (const at::Tensor& buffer : module.buffers()) EXPECT_FALSE(is_dist(buffer));
}

// Gradients of a forward on ordinary tensors.
void expect_plain_gradients(Block& net) {
  Block plain = make_block();
  const at::Tensor x = torch::ones({2, 6}, test_device());
  net->forward(x).sum().backward();
  plain->forward(x).sum().backward();
  const auto expected = plain->named_parameters();
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(torch::allclose(item.value().grad(), expected[item.key()].grad())) << item.key();
}

TEST(UnwrapModule, DistTensorsBecomeOrdinaryOnes) {
  for (const int ranks : {1, 2, 4}) {
    run_world(ranks, [](World& world) {
      const DeviceMesh mesh = DeviceMesh::over_world(world);
      Block net = make_block();
      const at::Tensor held = net->up->weight;
      auto layer = distribute_module(net, mesh, place);
      layer(distribute(torch::ones({2, 6}, test_device()), mesh, {})).sum().backward();
      layer.unwrap();
      expect_ordinary(*net);
      EXPECT_TRUE(held.is_same(net->up->weight));
      expect_same_state(plain_state(*net), plain_state(*make_block()), 0, "full values");
      expect_plain_gradients(net);
      expect_error([&] { layer.forward(torch::ones({2, 6}, test_device())); }, {"was unwrapped"});
      expect_error([&] { layer.unwrap(); }, {"none of its tensors is"});
    });
  }
}

TEST(UnwrapModule, TrainingGoesOnAlone) {
  run_world(2, [](World& world) {
    const DeviceMesh mesh = DeviceMesh::over_world(world);
    Block net = make_block(), plain = make_block();
    const at::Tensor x = torch::ones({2, 6}, test_device());
    {
      auto layer = distribute_module(net, mesh, place);
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
      layer(distribute(x, mesh, {})).square().sum().backward();
      sgd.step();
      layer.unwrap();
    }
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
    torch::optim::SGD alone(plain->parameters(), torch::optim::SGDOptions(0.1));
    net->forward(x).square().sum().backward();
    sgd.step();
    for (int step = 0; step < 2; ++step) {
      alone.zero_grad();
      plain->forward(x).square().sum().backward();
      alone.step();
    }
    expect_same_state(plain_state(*net), plain_state(*plain), 1e-6, "two steps");
  });
}

TEST(UnwrapModule, DistTensorsThatAreShardedBecomeOrdinaryOnes) {
  run_world(4, [](World&) {
    const DeviceMesh mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
    Block net = make_block();
    distribute_module(*net, mesh, [](const auto& name, auto& module, const auto& mesh) {
      auto* const linear = module.template as<torch::nn::LinearImpl>();
      if (linear) distribute_(linear->weight, mesh, {Replicate(), Shard(name == "up" ? 0 : 1)});
    });
    fully_shard(net, {.unit_bytes = 100, .mesh_dim = 0});
    unwrap(*net);
    expect_ordinary(*net);
    expect_same_state(plain_state(*net), plain_state(*make_block()), 0, "full values");
    expect_plain_gradients(net);
  });
}

TEST(UnwrapModule, ShardedModulesBecomeOrdinaryOnes) {
  run_world(2, [](World&) {
    Block net = make_block();
    const auto sharded = fully_shard(net, {.unit_bytes = 100});
    unwrap(*net);
    expect_ordinary(*net);
    expect_same_state(plain_state(*net), plain_state(*make_block()), 0, "full values");
    expect_error([&] { unwrap(*net); }, {"[unwrap]", "none of its tensors is"});
  });
}

}  // namespace tessera::testing::unwrap_test
