// Fused kernels of LibTorch, in every dtype, against the plain step.
#include "engine/optim/fused_step.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::testing::fused_step_test {

using namespace torch::optim;

struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(const torch::Tensor&)> make;
};

template <class O, class Options>
void add(std::vector<Case>& cases, const std::string& name, const Options& options) {
  cases.push_back({name, [=](const torch::Tensor& param) -> std::unique_ptr<Optimizer> {
                     return std::make_unique<O>(std::vector<torch::Tensor>{param}, options);
                   }});
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const double decay : {0., 0.1}) {
    const auto sgd = [&] { return SGDOptions(0.5).weight_decay(decay); };
    add<SGD>(cases, "SGD", sgd());
    add<SGD>(cases, "SGD with momentum", sgd().momentum(0.9));
    add<SGD>(cases, "SGD with Nesterov", sgd().momentum(0.9).nesterov(true));
    add<SGD>(cases, "SGD with dampening", sgd().momentum(0.9).dampening(0.2));
    for (const bool amsgrad : {false, true}) {
      add<Adam>(cases, "Adam", AdamOptions(0.5).weight_decay(decay).amsgrad(amsgrad));
      add<AdamW>(cases, "AdamW", AdamWOptions(0.5).weight_decay(decay).amsgrad(amsgrad));
    }
    for (const double lr_decay : {0., 0.1})
      add<Adagrad>(cases, "Adagrad", AdagradOptions(0.5).weight_decay(decay).lr_decay(lr_decay));
  }
  return cases;
}

constexpr torch::Dtype kDtypes[] = {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf};
constexpr int kSteps = 3;

double unit_roundoff(torch::Dtype dtype) {
  switch (dtype) {
    case torch::kDouble:
      return 0x1p-53;
    case torch::kFloat:
      return 0x1p-24;
    case torch::kHalf:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

// Numbers from 1 to 2, as rounded to `dtype`.
torch::Tensor numbers(int64_t numel, int seed, torch::Dtype dtype) {
  return seeded(seed, [&] { return torch::rand({numel}, torch::kDouble); }).add(1).to(dtype);
}

// A fused step changes all elements as the plain step does in double, up to rounding, or nothing.
void expect_fused(const Case& item, torch::Dtype dtype, int64_t numel, bool is_wanted) {
  const std::string what = fmt::format("{}, {}, {}", item.name, c10::toString(dtype), numel);
  const torch::Tensor param = numbers(numel, 1, dtype), exact = param.to(torch::kDouble);
  const auto fused = item.make(param), plain = item.make(exact);
  for (int step = 0; step < kSteps; ++step) {
    param.mutable_grad() = numbers(numel, step + 2, dtype);
    exact.mutable_grad() = param.grad().to(torch::kDouble);
    const torch::Tensor before = param.clone();
    if (!fused_step(*fused)) {
      EXPECT_FALSE(is_wanted) << what << ": was not fused";
      EXPECT_TRUE(torch::equal(param, before)) << what;
      return;
    }
    plain->step();
  }
  // 3 steps store 4 tensors each and round up to 6 options; float's own roundings are 30 a step.
  const double own = unit_roundoff(dtype), computed = std::min(own, unit_roundoff(torch::kFloat));
  const double bound = kSteps * (10 * own + 30 * computed) * exact.abs().max().item<double>();
  EXPECT_LE((param.to(torch::kDouble) - exact).abs().max().item<double>(), bound) << what;
}

TEST(FusedStep, StepsAsThePlainOptimizerInEveryDtypeOrNotAtAll) {
  for (const Case& item : all_cases()) {
    for (const torch::Dtype dtype : kDtypes) {
      const bool is_wide = dtype == torch::kFloat || dtype == torch::kDouble;
      for (const int64_t numel : {1, 31, 1000}) expect_fused(item, dtype, numel, is_wide);
    }
  }
}

TEST(FusedStep, IsNotTakenForADtypeWithoutAKernel) {
  const torch::Tensor param = torch::ones({100}, torch::kLong);
  AdamW adamw({param}, AdamWOptions(0.5));
  param.mutable_grad() = torch::ones({100}, torch::kLong);
  EXPECT_FALSE(fused_step(adamw));
  EXPECT_EQ(param.sum().item<int64_t>(), 100);
}

// With the default options and without masters. The gradient is 1, and so is the change.
TEST(FusedStep, SgdTrainsParametersOfEveryDtype) {
  for (const int ranks : {1, 2, 4}) {
    for (const torch::Dtype dtype : kDtypes) {
      const TrainingRun run = in_dtype(run_by<Mlp, SGD>(SGDOptions(1)), dtype);
      auto want = plain_state(*run.make_net());
      for (NamedTensor& item : want) item.tensor.sub_(1);
      on_worlds({ranks}, at_each_level({.unit_bytes = 3000}), [&](World&, const ShardPlan& plan) {
        const auto net = run.make_net();
        auto sharded = fully_shard(net, plan);
        const auto sgd = run.make_optimizer(*net);
        ShardedOptimizer optimizer(sharded, *sgd);
        torch::Tensor sum = torch::zeros({}, net->parameters()[0].options());
        for (const torch::Tensor& param : net->parameters()) sum = sum + param.sum();
        sum.backward();
        optimizer.step();
        expect_same_state(sharded.full_state(), want, 0, c10::toString(dtype));
      });
    }
  }
}

}  // namespace tessera::testing::fused_step_test
