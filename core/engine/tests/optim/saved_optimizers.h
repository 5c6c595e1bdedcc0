#pragma once

// Optimizers whose state is saved, with one of a user's own, and comparisons of it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/models.h"

namespace tessera::testing {

using namespace torch::optim;

constexpr int64_t kMlpWidth = 9, kMlpOut = 5;

inline std::shared_ptr<Mlp> make_saved_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(kMlpWidth, 2, kMlpOut); });
}

struct HeavyBallOptions : OptimizerCloneableOptions<HeavyBallOptions> {
  HeavyBallOptions(double lr) : lr_(lr) {}
  TORCH_ARG(double, lr);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  }
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

struct HeavyBallState : OptimizerCloneableParamState<HeavyBallState> {
  TORCH_ARG(torch::Tensor, speed);
  TORCH_ARG(torch::Tensor, total);  // one element: of all steps
  TORCH_ARG(int64_t, count) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, speed);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, total);
    torch::serialize::InputArchive inner;
    archive.read("counts", inner);
    c10::IValue value;
    inner.read("count", value);
    count(value.toInt());
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(speed);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(total);
    torch::serialize::OutputArchive inner(archive.compilation_unit());
    inner.write("count", c10::IValue(count()));
    archive.write("counts", inner);
  }
};

// Its state for a parameter: a tensor of its shape, a tensor of one element, an archive.
class HeavyBall : public Optimizer {
 public:
  HeavyBall(std::vector<torch::Tensor> params, HeavyBallOptions options)
      : Optimizer(std::move(params), std::make_unique<HeavyBallOptions>(options)) {}

  torch::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    ++calls;
    for (auto& group : param_groups_) {
      for (auto& param : group.params()) {
        if (!param.grad().defined()) continue;
        auto& slot = state_[param.unsafeGetTensorImpl()];
        if (!slot) {
          slot = std::make_unique<HeavyBallState>();
          auto& fresh = static_cast<HeavyBallState&>(*slot);
          fresh.speed(torch::zeros_like(param, torch::MemoryFormat::Preserve));
          fresh.total(torch::zeros({1}));
        }
        auto& state = static_cast<HeavyBallState&>(*slot);
        state.count(state.count() + 1);
        state.total().add_(1);
        state.speed().mul_(0.9).add_(param.grad());
        param.sub_(state.speed(), group.options().get_lr() / std::sqrt(state.count()));
      }
    }
    return {};
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<HeavyBallState, HeavyBallOptions>(archive, *this);
    archive.write("calls", c10::IValue(calls));
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<HeavyBallState, HeavyBallOptions>(archive, *this);
    c10::IValue value;
    archive.read("calls", value);
    calls = value.toInt();
  }
  int64_t calls = 0;
};

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(Net&)>;

struct NamedOptimizer {
  std::string name;
  MakeOptimizer make;
};

template <class O, class Options>
NamedOptimizer named(std::string name, Options options) {
  return {std::move(name), [=](Net& net) -> std::unique_ptr<Optimizer> {
            return std::make_unique<O>(net.parameters(), options);
          }};
}

// Weights and biases in groups of their own, whose parameters are interleaved.
inline std::unique_ptr<Optimizer> make_groups(Net& net) {
  std::vector<torch::Tensor> weights, rest;
  for (const auto& param : net.parameters()) (param.dim() > 1 ? weights : rest).push_back(param);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(rest, std::make_unique<AdamWOptions>(AdamWOptions(3e-2).weight_decay(0)));
  groups.emplace_back(weights, std::make_unique<AdamWOptions>(AdamWOptions(1e-2).amsgrad(true)));
  return std::make_unique<AdamW>(groups, AdamWOptions(1e-3));
}

inline std::vector<NamedOptimizer> all_optimizers() {
  return {
      named<AdamW>("AdamW", AdamWOptions(1e-2).amsgrad(true)),
      named<Adam>("Adam", AdamOptions(1e-2).weight_decay(0.1)),
      named<SGD>("SGD with momentum", SGDOptions(0.1).momentum(0.9)),
      named<SGD>("SGD", SGDOptions(0.1)),
      named<Adagrad>("Adagrad", AdagradOptions(1e-2).initial_accumulator_value(0.3)),
      named<RMSprop>("RMSprop", RMSpropOptions(1e-3).momentum(0.5).centered(true)),
      named<CPUAdam>("CPUAdam", CPUAdamOptions(1e-2).weight_decay(0.1).adamw_mode(false)),
      named<HeavyBall>("HeavyBall", HeavyBallOptions(0.1)),
      {"AdamW with two param groups", make_groups},
  };
}

// Takes steps `first` to `last` - 1 on the rows of `ranks` ranks, adding up their gradients.
inline void train(Net& net, Optimizer& optimizer, int ranks, int first, int last) {
  for (int step = first; step < last; ++step) {
    const Batch batch = global_batch(step, 12, kMlpWidth, kMlpOut);
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank)
      (rank_loss(net, batch, rank, ranks, step) / ranks).backward();
    optimizer.step();
  }
}

// A run of the saved model by this optimizer.
inline TrainingRun saved_run(const MakeOptimizer& make) {
  TrainingRun run = sgd_run<Mlp>(kMlpWidth, 2, kMlpOut);
  run.make_optimizer = make;
  run.in = kMlpWidth;
  return run;
}

struct Plain {
  explicit Plain(const MakeOptimizer& make) : net(make_saved_mlp()), optimizer(make(*net)) {}
  std::shared_ptr<Mlp> net;
  std::unique_ptr<Optimizer> optimizer;
};

using Values = OptimizerStateDict::Values;

inline void expect_same_values(const Values& actual, const Values& expected, double tolerance,
                               const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, want] : expected) {
    ASSERT_TRUE(actual.contains(name)) << what << ": no " << name;
    const c10::IValue& got = actual.at(name);
    ASSERT_EQ(got.isTensor(), want.isTensor()) << what << ": " << name;
    if (!want.isTensor()) {
      EXPECT_EQ(fmt::format("{}", c10::str(got)), fmt::format("{}", c10::str(want)))
          << what << ": " << name;
      continue;
    }
    const torch::Tensor a = got.toTensor().cpu(), b = want.toTensor().cpu();
    ASSERT_EQ(a.sizes(), b.sizes()) << what << ": " << name;
    EXPECT_EQ(a.strides(), b.strides()) << what << ": " << name;
    EXPECT_TRUE(tolerance == 0 ? torch::equal(a, b) : torch::allclose(a, b, tolerance, tolerance))
        << what << ": " << name << " differs by " << (a - b).abs().max().item<double>();
  }
}

inline void expect_same_dict(const OptimizerStateDict& actual, const OptimizerStateDict& expected,
                             double tolerance, const std::string& what) {
  ASSERT_EQ(actual.param_groups.size(), expected.param_groups.size()) << what;
  for (size_t i = 0; i < expected.param_groups.size(); ++i) {
    EXPECT_EQ(actual.param_groups[i].params, expected.param_groups[i].params) << what;
    expect_same_values(actual.param_groups[i].options, expected.param_groups[i].options, 0,
                       fmt::format("{}, group {}", what, i));
  }
  ASSERT_EQ(actual.state.size(), expected.state.size()) << what;
  for (const auto& [number, values] : expected.state) {
    ASSERT_TRUE(actual.state.contains(number)) << what << ": no " << number;
    expect_same_values(actual.state.at(number), values, tolerance,
                       fmt::format("{}, parameter {}", what, number));
  }
  expect_same_values(actual.extra, expected.extra, 0, what + ", extra");
}

inline OptimizerStateDict copy_of(const OptimizerStateDict& dict) {
  OptimizerStateDict copy = dict;
  for (auto& [number, values] : copy.state) {
    for (auto& [name, value] : values)
      if (value.isTensor()) value = value.toTensor().clone(torch::MemoryFormat::Preserve);
  }
  return copy;
}

/// An optimizer that saves nothing.
struct WithoutSave : SGD {
  using SGD::SGD;
  void save(torch::serialize::OutputArchive& archive) const override { Optimizer::save(archive); }
};

}  // namespace tessera::testing
