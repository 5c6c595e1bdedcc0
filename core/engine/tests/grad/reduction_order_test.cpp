// When reductions begin while backward runs.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include <functional>
#include <thread>

#include "support/counted_job.h"
namespace tessera::testing::reduction_order_test {

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
    TrainingRun run = run_by<Tied, torch::optim::SGD>(torch::optim::SGDOptions(0.1), has_unused);
    CountedJob<Tied> job(run, world, {.level = ShardLevel::kGradients, .unit_bytes = kUnitBytes});
    job.net->on_first_gradient = [&] {
      if (world.rank() == 0) calls.push_back(job.shard->counts().reduce_scatter.calls);
    };
    for (int step = 0; step < 3; ++step) job.count_step(step);
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
  for (const int ranks : {1, 2, 3, 4})
    expect_parity_of_each(
        run, ranks, cases_of(at_each_level({.unit_bytes = kUnitBytes}), ranks == 3 ? 2e-5 : 0));
}

TEST(ReductionOrder, GradientsMayBeClearedWhileTheyAreReduced) {
  const auto train = [](World& world, const ShardPlan& plan, bool clears) {
    ShardedJob job(sgd_run<Mlp>(), world, plan);
    for (int step = 0; step < 4; ++step) {
      if (clears) job.backward(100 + step);
      // The ranks are not at the same point when they clear.
      if (clears && world.rank() == step % 2)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      job.step(step);
    }
    return job.state();
  };
  on_worlds({2, 3}, at_each_level({.unit_bytes = kUnitBytes}),
            [&](World& world, const ShardPlan& plan) {
              expect_same_state(train(world, plan, true), train(world, plan, false), 0, "cleared");
            });
}

}  // namespace tessera::testing::reduction_order_test
