// When reductions begin while backward runs.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include <chrono>
#include <functional>
#include <thread>

#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace reduction_order_test {

using namespace testing;

constexpr int kLayers = 4;
constexpr int64_t kWidth = 37;
constexpr int64_t kUnitBytes = 6000;  // a layer in each unit

// Layers between two uses of one weight, as of a tied embedding. A parameter of the last layer may
// get no gradient. `on_first_gradient` is called when those of all layers have arrived.
struct Tied : Net {
  explicit Tied(bool has_unused) {
    tied = register_parameter("tied", torch::randn({kWidth, kWidth}) / 6);
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
    if (has_unused) layers.back()->register_parameter("unused", torch::ones({3}));
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::matmul(x, tied);
    x.register_hook([this](const torch::Tensor& gradient) {
      on_first_gradient();
      return gradient;
    });
    for (int i = 0; i < kLayers; ++i) {
      x = layers[i]->forward(torch::gelu(x));
    }
    return torch::matmul(x, tied.t()).narrow(1, 0, 5);
  }
  torch::Tensor tied;
  std::vector<torch::nn::Linear> layers;
  std::function<void()> on_first_gradient;
};

// Per step, the reductions that have begun before the gradient of layer 0's input is passed on.
std::vector<int64_t> reduced_in_backward(int ranks, bool has_unused) {
  std::vector<int64_t> calls;
  run_world(ranks, [&](World& world) {
    const auto counter = counting_process_group(world.process_group());
    const auto net = seeded(7, [&] { return std::make_shared<Tied>(has_unused); });
    net->on_first_gradient = [&] {
      if (world.rank() == 0) calls.push_back(counter->counts().reduce_scatter.calls);
    };
    auto sharded = fully_shard(
        net, {.level = ShardLevel::kGradients, .unit_bytes = kUnitBytes, .process_group = counter});
    torch::optim::SGD sgd(sharded->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, sgd);
    for (int step = 0; step < 3; ++step) {
      counter->reset_counts();
      optimizer.zero_grad();
      const Batch batch = global_batch(step, 12, kWidth, 5);
      rank_loss(*net, batch, world.rank(), world.size(), step).backward();
      optimizer.step();
    }
  });
  return calls;
}

TEST(ReductionOrder, ATiedWeightDoesNotHoldUpTheUnitsBetweenItsUses) {
  for (const int ranks : {2, 3}) {
    EXPECT_EQ(reduced_in_backward(ranks, /*has_unused=*/false),
              (std::vector<int64_t>{kLayers, kLayers, kLayers}));
  }
}

TEST(ReductionOrder, AUnitThatIsNeverCompleteHoldsUpNoOther) {
  // In the first step the order is not known yet: the last layer is the first one.
  EXPECT_EQ(reduced_in_backward(2, /*has_unused=*/true),
            (std::vector<int64_t>{0, kLayers - 1, kLayers - 1}));
}

TEST(ReductionOrder, RanksThatCompleteDifferentUnitsReduceTheSame) {
  struct Half : Mlp {
    torch::Tensor forward(torch::Tensor x) override {
      // Each rank leaves out one layer, and in the third step none.
      for (size_t i = 0; i < fcs.size(); ++i) {
        if (step == 2 || static_cast<int>(i) != 1 + rank % 2) x = torch::gelu(fcs[i]->forward(x));
      }
      return head->forward(norm->forward(x));
    }
  };
  TrainingRun run = sgd_run<Half>();
  run.steps = 5;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const ShardLevel level : kAllLevels) {
      expect_parity(run, ranks, {.level = level, .unit_bytes = kUnitBytes}, "layers left out",
                    {.fused = false}, ranks == 3 ? 2e-5 : 0);
    }
  }
}

TEST(ReductionOrder, GradientsMayBeClearedWhileTheyAreReduced) {
  const TrainingRun run = sgd_run<Mlp>();
  const auto train = [&](World& world, ShardLevel level, bool clears) {
    auto net = run.make_net();
    auto sharded = fully_shard(net, {.level = level, .unit_bytes = kUnitBytes});
    torch::optim::SGD sgd(sharded->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, sgd);
    const auto backward = [&](int batch) {
      rank_loss(*net, global_batch(batch, run.rows, run.in, run.out), world.rank(), world.size(),
                batch)
          .backward();
    };
    for (int step = 0; step < 4; ++step) {
      if (clears) backward(100 + step);
      // The ranks are not at the same point when they clear.
      if (clears && world.rank() == step % 2)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      optimizer.zero_grad();
      backward(step);
      optimizer.step();
    }
    return sharded.full_state();
  };
  for (const int ranks : {2, 3}) {
    run_world(ranks, [&](World& world) {
      for (const ShardLevel level : kAllLevels)
        expect_same_state(train(world, level, true), train(world, level, false), 0, "cleared");
    });
  }
}

}  // namespace reduction_order_test
}  // namespace tessera
