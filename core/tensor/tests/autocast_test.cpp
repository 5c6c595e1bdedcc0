// Autocast of operators on DistTensors, ranks as threads included.

#include "support/autocast.h"

#include <gtest/gtest.h>
#include <tessera/parallel/distribute_module.h>
#include <torch/torch.h>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::testing::autocast_test {

namespace nn = torch::nn;

struct NetImpl : nn::Module {
  NetImpl() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
    torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) parameter.normal_(0, 0.1, generator);
    to(test_device());
  }
  // `up` is used twice, with one cast in one process.
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::gelu(up(norm(x)));
    return down(h * torch::sigmoid(up(x)));
  }
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
  nn::Linear up = register_module("up", nn::Linear(8, 12));
  nn::Linear down = register_module("down", nn::Linear(12, 8));
};
TORCH_MODULE(Net);

void place(const std::string& name, nn::Module& module, const DeviceMesh& mesh) {
  auto* const linear = module.as<nn::LinearImpl>();
  if (!linear) return;
  distribute_(linear->weight, mesh, {Shard{name == "up" ? 0 : 1}});
  if (name == "up") distribute_(linear->bias, mesh, {Shard{0}});
}

at::Tensor loss_of(Net& net, const at::Tensor& x, at::ScalarType dtype) {
  const Autocast autocast(dtype);
  const at::Tensor y = net->forward(x);
  EXPECT_EQ(y.scalar_type(), dtype);
  return y.to(at::kFloat).square().mean();
}

TEST(Autocast, OfDistTensorsComputesInItsDtype) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      Net dist, plain;
      distribute_module(*dist, mesh, place);
      const at::Tensor x =
          on_test_device(torch::randn({6, 8}, at::make_generator<at::CPUGeneratorImpl>(2)));
      for (int step = 0; step < 3; ++step) {
        dist->zero_grad();
        plain->zero_grad();
        const at::Tensor expected = loss_of(plain, x, at::kBFloat16);
        expected.backward();
        const at::Tensor found = loss_of(dist, x, at::kBFloat16);
        found.backward();
        EXPECT_NEAR(full_tensor(found).item<double>(), expected.item<double>(), 1e-3);
        const auto of_plain = plain->named_parameters();
        for (const auto& item : dist->named_parameters()) {
          EXPECT_EQ(item.value().grad().scalar_type(), at::kFloat);
          EXPECT_TRUE(torch::allclose(full_tensor(item.value().grad()), of_plain[item.key()].grad(),
                                      2e-2, 1e-3))
              << item.key();
        }
      }
    });
  }
}

// Threads leave autocast at different times; the number of messages does not depend on it.
TEST(Autocast, RanksThatAreThreadsHaveNoCacheInCommon) {
  run_world(2, [](World& world) {
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    const auto mesh = DeviceMesh::over_world();
    Net dist;
    distribute_module(*dist, mesh, place);
    const at::Tensor x = on_test_device(torch::ones({6, 8}));
    for (int step = 0; step < 20; ++step) {
      dist->zero_grad();
      const at::Tensor loss = loss_of(dist, x, at::kBFloat16);
      if (world.rank() == step % 2) at::autocast::clear_cache();
      loss.backward();
    }
  });
}

}  // namespace tessera::testing::autocast_test
