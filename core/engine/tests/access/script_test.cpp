// Scripted modules, autocast, and modules that hold handles of their own to parameters.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/script.h>

#include "support/models.h"

namespace tessera::testing::script_test {

torch::jit::Module make_script() {
  manual_seed(7);
  torch::jit::Module module("net");
  module.register_parameter("w1", torch::randn({37, 37}).mul_(0.1).requires_grad_(), false);
  module.register_parameter("b1", torch::zeros({37}).requires_grad_(), false);
  module.register_parameter("w2", torch::randn({37, 5}).mul_(0.1).requires_grad_(), false);
  module.define(R"(
def forward(self, x):
    h = torch.tanh(torch.matmul(x, self.w1) + self.b1)
    return torch.matmul(h, self.w2)
)");
  module.to(test_device());
  return module;
}

std::vector<at::Tensor> parameters_of(const torch::jit::Module& module) {
  std::vector<at::Tensor> params;
  for (const auto& param : module.parameters()) params.push_back(param);
  return params;
}

torch::Tensor script_loss(torch::jit::Module& module, int step, int rank, int size) {
  const Batch batch = global_batch(step, 12, 37, 5);
  return torch::mse_loss(module.forward({rows_of(batch.x, rank, size)}).toTensor(),
                         rows_of(batch.y, rank, size));
}

TEST(Script, AScriptedModuleTrainsLikeInOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    auto alone = make_script();
    torch::optim::SGD plain(parameters_of(alone), 0.1);
    for (int step = 0; step < 6; ++step) {
      plain.zero_grad();
      for (int rank = 0; rank < ranks; ++rank)
        (script_loss(alone, step, rank, ranks) / ranks).backward();
      plain.step();
    }
    std::vector<NamedTensor> expected;
    for (const auto& item : alone.named_parameters())
      expected.push_back({item.name, item.value.detach()});
    for (const auto level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
      run_world(ranks, [&](World& world) {
        auto module = make_script();
        torch::optim::SGD inner(parameters_of(module), 0.1);
        auto sharded = fully_shard(module, {.level = level, .unit_bytes = 0});
        ShardedOptimizer optimizer(sharded, inner);
        for (int step = 0; step < 6; ++step) {
          optimizer.zero_grad();
          script_loss(module, step, world.rank(), world.size()).backward();
          optimizer.step();
        }
        expect_same_state(sharded.full_state(), expected, 1e-5, fmt::format("{} ranks", ranks));
      });
    }
  }
}

// Registers its parameters, and also keeps them as plain members and in a list.
struct Holding : Net {
  Holding() {
    weight = register_parameter("weight", torch::randn({37, 5}));
    all.push_back(weight);
    transposed = weight.t();
  }
  torch::Tensor forward(torch::Tensor x) override { return x.matmul(all[0]) + x.matmul(weight); }
  torch::Tensor weight, transposed;
  std::vector<torch::Tensor> all;
};

TEST(MemberHandles, SeeTheShardedValues) {
  for (const int ranks : {1, 2, 3})
    expect_parity_of_each(sgd_run<Holding>(), ranks, cases_of(at_each_level()));
}

}  // namespace tessera::testing::script_test
