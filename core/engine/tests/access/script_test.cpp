// Scripted modules, autocast, and modules that hold handles of their own to parameters.
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/script.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace script_test {

using namespace testing;

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

TEST(Autocast, CastsGatheredParametersLikeInOneProcess) {
  const auto loss = [](Net& net, int rank, int size, int step) {
    const at::DeviceType device = test_device().type();
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
    const auto value = rank_loss(net, global_batch(step, 12, 37, 5), rank, size, step);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device, false);
    return value;
  };
  const TrainingRun run = sgd_run<Mlp>(37, 2, 5);
  for (const int ranks : {1, 2}) {
    const auto alone = run.make_net();
    const auto plain = run.make_optimizer(*alone);
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      for (int rank = 0; rank < ranks; ++rank) (loss(*alone, rank, ranks, step) / ranks).backward();
      plain->step();
    }
    for (const auto level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
      run_world(ranks, [&](World& world) {
        const auto net = run.make_net();
        const auto inner = run.make_optimizer(*net);
        auto sharded = fully_shard(net, {.level = level, .unit_bytes = 6000});
        ShardedOptimizer optimizer(sharded, *inner, {.fused = false});
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          loss(*net, world.rank(), world.size(), step).backward();
          optimizer.step();
        }
        expect_same_state(sharded.full_state(), plain_state(*alone), 1e-6,
                          fmt::format("{} ranks", ranks));
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
  for (const int ranks : {1, 2, 3}) {
    for (const auto level : {ShardLevel::kNone, ShardLevel::kGradients, ShardLevel::kParameters}) {
      expect_parity(sgd_run<Holding>(), ranks, {.level = level}, "members", {.fused = false},
                    ranks == 3 ? 2e-6 : 0);
    }
  }
}

}  // namespace script_test
}  // namespace tessera
