#pragma once

// Paddle's own tests of `group_sharded_parallel`, as far as they are alike: a classifier of three
// Linear layers, AdamW with weight decay, clipping to norm 1, a scaler, automatic mixed precision.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dialects/tests/training.h"
#include "engine/optim/fused_step.h"
#include "support/autocast.h"
#include "support/distinct_parameters.h"
#include "support/scratch_directory.h"

namespace tessera::testing {

constexpr int64_t kScenarioRows = 40;  // of a global batch: five parts on each of 4 ranks

inline torch::optim::AdamWOptions scenario_adamw_options() {
  return torch::optim::AdamWOptions(1e-3).weight_decay(1e-5);
}
inline std::unique_ptr<torch::optim::Optimizer> make_scenario_adamw(Net& net) {
  return std::make_unique<torch::optim::AdamW>(distinct_parameters(net), scenario_adamw_options());
}
inline std::unique_ptr<torch::optim::Optimizer> make_momentum(Net& net) {
  return std::make_unique<torch::optim::SGD>(distinct_parameters(net),
                                             torch::optim::SGDOptions(1e-2).momentum(0.9));
}

/// Paddle's SpecialModel: a Linear shared by the root, an encoder and a decoder, and a GroupNorm
/// that stays whole.
struct Coder : torch::nn::Module {
  explicit Coder(const torch::nn::Linear& shared)
      : first(register_module("first", torch::nn::Linear(kIn, kIn))),
        shared(register_module("shared", shared)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return shared->forward(torch::tanh(first->forward(x)));
  }
  torch::nn::Linear first, shared;
};
struct SpecialModel : Net {
  torch::Tensor forward(torch::Tensor x) override {
    x = norm->forward(encoder->forward(torch::tanh(shared->forward(x))));
    return out->forward(decoder->forward(x));
  }
  torch::nn::Linear shared = register_module("shared", torch::nn::Linear(kIn, kIn));
  std::shared_ptr<Coder> encoder = register_module("encoder", std::make_shared<Coder>(shared));
  torch::nn::GroupNorm norm = register_module("norm", torch::nn::GroupNorm(4, kIn));
  std::shared_ptr<Coder> decoder = register_module("decoder", std::make_shared<Coder>(shared));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(kIn, kOut));
};

/// One of Paddle's tests. `os` and `os_g` have no segments; at `p_g_os` biases stay whole.
struct Scenario {
  MakeNet net = make_mlp;
  MakeOptimizer optimizer = make_scenario_adamw;
  paddle::GroupShardedOptions options = {.segment_size = 100,
                                         .grad_clip = paddle::ClipGradByGlobalNorm{1.0}};
  std::optional<at::ScalarType> o1 = {};  ///< AMP O1: float parameters, autocast to this dtype
  std::optional<at::ScalarType> o2 = {};  ///< AMP O2: parameters and inputs of this dtype
  double init_scale = 0;                  ///< of a GradScaler; 0: none
  int steps = 5;
  int parts = 1;  ///< backwards per step, each on one of so many parts of the batch
  /// Chooses the process groups.
  std::function<void(World&, paddle::GroupShardedOptions&)> place = [](auto&, auto&) {};
  std::function<void(Net&)> after_step = [](Net&) {};
};

/// The result of training: the losses of all ranks, rank by rank, and the parameters.
struct Trained {
  std::vector<float> losses;
  std::vector<NamedTensor> state;
  double largest_norm = 0;  ///< of the gradients; known for one process only
};

inline std::shared_ptr<Net> make_net(const Scenario& scenario) {
  auto net = scenario.net();
  if (scenario.o2) net->to(*scenario.o2);
  return net;
}

/// The loss of a part of a rank's rows of the batch of a step.
template <class Forward>
torch::Tensor scenario_loss(const Scenario& scenario, int step, int rank, int ranks, int part,
                            Forward&& forward) {
  const Batch batch = global_batch(step, kScenarioRows, kIn, kOut);
  const auto x = rows_of(rows_of(batch.x, rank, ranks), part, scenario.parts);
  const auto y = rows_of(rows_of(batch.y, rank, ranks), part, scenario.parts);
  const Autocast autocast(scenario.o1);
  const auto out = forward(scenario.o2 ? x.to(*scenario.o2) : x);
  return torch::nn::functional::cross_entropy(out.to(torch::kFloat), y.argmax(1)) / scenario.parts;
}

/// One rank that trains.
class ScenarioJob {
 public:
  ScenarioJob(World& world, const std::string& level, const Scenario& scenario)
      : scenario_(scenario),
        world_(world),
        net(make_net(scenario)),
        inner(scenario.optimizer(*net)),
        scaler({.init_scale = std::max(scenario.init_scale, 1.0)}),
        sharded(paddle::group_sharded_parallel(net, *inner, level, options())) {}

  void train(int first, int last) {
    for (int step = first; step < last; ++step) {
      sharded.optimizer.clear_grad();
      float sum = 0;
      for (int part = 0; part < scenario_.parts; ++part) {
        const auto loss = scenario_loss(scenario_, step, world_.rank(), world_.size(), part,
                                        [&](const torch::Tensor& x) { return sharded.model(x); });
        sum += loss.item<float>();
        (scales() ? scaler.scale(loss) : loss).backward();
      }
      losses.push_back(sum);
      if (!scales()) {
        sharded.optimizer.step();
      } else {
        scaler.step(sharded.optimizer);
        scaler.update();
      }
      scenario_.after_step(*net);
    }
  }

 private:
  bool scales() const { return scenario_.init_scale > 0; }
  paddle::GroupShardedOptions options() {
    auto options = scenario_.options;
    if (scales()) options.scaler = &scaler;
    scenario_.place(world_, options);
    return options;
  }

  const Scenario& scenario_;
  World& world_;

 public:
  std::shared_ptr<Net> net;
  std::unique_ptr<torch::optim::Optimizer> inner;
  GradScaler scaler;
  paddle::GroupSharded<Net> sharded;
  std::vector<float> losses;
};

/// The losses and the parameters that the ranks ended with. They must have the same bits.
inline Trained collect(const std::vector<Trained>& ranks, const std::string& what) {
  Trained all{.losses = {}, .state = ranks[0].state};
  for (const Trained& rank : ranks) {
    expect_same_state(rank.state, all.state, 0, what + ": replicas");
    all.losses.insert(all.losses.end(), rank.losses.begin(), rank.losses.end());
  }
  return all;
}

inline Trained train(int ranks, const std::string& level, const Scenario& scenario) {
  std::vector<Trained> all(ranks);
  run_world(ranks, [&](World& world) {
    ScenarioJob job(world, level, scenario);
    job.train(0, scenario.steps);
    all[world.rank()] = {.losses = job.losses, .state = job.sharded.model.full_state()};
  });
  return collect(all, level + " on " + std::to_string(ranks) + " ranks");
}

/// The gradients of a step in one process: the mean over the ranks for each part, in float.
inline std::vector<torch::Tensor> gradients_alone(const Scenario& scenario, Net& net, int step,
                                                  int ranks, double scale,
                                                  std::vector<std::vector<float>>& losses) {
  const auto params = distinct_parameters(net);
  std::vector<torch::Tensor> total(params.size());
  for (int part = 0; part < scenario.parts; ++part) {
    std::vector<torch::Tensor> sums(params.size());
    for (int rank = 0; rank < ranks; ++rank) {
      net.zero_grad();
      const auto loss = scenario_loss(scenario, step, rank, ranks, part,
                                      [&](const torch::Tensor& x) { return net.forward(x); });
      if (part == 0) losses[rank].push_back(0);
      losses[rank].back() += loss.item<float>();
      (loss * scale).backward();
      for (size_t i = 0; i < params.size(); ++i) {
        if (!params[i].grad().defined()) continue;
        const auto grad = params[i].grad().to(torch::kFloat);
        sums[i] = sums[i].defined() ? sums[i] + grad : grad.clone();
      }
    }
    for (size_t i = 0; i < params.size(); ++i) {
      if (!sums[i].defined()) continue;
      const auto mean = sums[i] / ranks;
      total[i] = total[i].defined() ? total[i] + mean : mean;
    }
  }
  return total;
}

/// Divides by the scale and clips as `ClipGradByGlobalNorm` does; returns the norm before clipping.
inline double clip_alone(std::vector<torch::Tensor>& grads, double scale, double clip_norm) {
  double squares = 0;
  for (auto& grad : grads) {
    if (!grad.defined()) continue;
    grad = grad * (1 / scale);
    squares += std::pow(grad.norm().item<double>(), 2);
  }
  const double norm = std::sqrt(squares);
  if (!std::isfinite(norm)) return norm;
  for (auto& grad : grads) {
    if (grad.defined()) grad = grad * (clip_norm / std::max(norm, clip_norm));
  }
  return norm;
}

/// Does the work of all ranks in one process, with float masters of its own.
inline Trained train_alone(int ranks, const Scenario& scenario) {
  const auto net = make_net(scenario), masters = make_net(scenario);
  masters->to(torch::kFloat);
  const auto optimizer = scenario.optimizer(*masters);
  const auto params = distinct_parameters(*net), updated = distinct_parameters(*masters);
  std::vector<std::vector<float>> losses(ranks);
  double scale = std::max(scenario.init_scale, 1.0), largest_norm = 0;
  for (int step = 0; step < scenario.steps; ++step) {
    auto grads = gradients_alone(scenario, *net, step, ranks, scale, losses);
    const double norm = clip_alone(grads, scale, scenario.options.grad_clip->clip_norm);
    if (!std::isfinite(norm)) {  // the scaler skips the step
      scale /= 2;
      continue;
    }
    largest_norm = std::max(largest_norm, norm);
    for (size_t i = 0; i < updated.size(); ++i) updated[i].mutable_grad() = grads[i];
    if (!fused_step(*optimizer)) optimizer->step();
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(updated[i]);
  }
  Trained all{.losses = {}, .state = plain_state(*net), .largest_norm = largest_norm};
  for (const auto& rank : losses) all.losses.insert(all.losses.end(), rank.begin(), rank.end());
  return all;
}

/// Returns true where sums over ranks are rounded to half precision: a device's backend adds up in
/// the dtype of the messages. AdamW makes a step of up to its rate, 1e-3, from the least difference
/// between gradients near 0, in each of five steps.
inline bool rounds_sums() { return !tests_on_host(); }
constexpr double kRoundedState = 1e-2, kRoundedLoss = 2e-3;

/// Expects |a - b| <= atol + rtol |b| of all elements, as Paddle's tests do with numpy's allclose.
inline void expect_close(const std::vector<NamedTensor>& actual,
                         const std::vector<NamedTensor>& expected, double rtol, double atol,
                         const std::string& what) {
  for_each_pair(actual, expected, what, [&](const NamedTensor& want, const torch::Tensor& got) {
    const auto a = got.cpu().to(torch::kDouble), b = want.tensor.cpu().to(torch::kDouble);
    EXPECT_TRUE(torch::allclose(a, b, rtol, atol))
        << what << ": " << want.name << " differs by " << (a - b).abs().max().item<double>();
  });
}

inline void expect_close_losses(const Trained& actual, const Trained& expected, double atol,
                                const std::string& what) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size()) << what;
  for (size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(actual.losses[i], expected.losses[i], atol) << what << ", loss " << i;
}

/// Equal bits: losses and parameters.
inline void expect_equal(const Trained& actual, const Trained& expected, const std::string& what) {
  EXPECT_EQ(actual.losses, expected.losses) << what;
  expect_same_state(actual.state, expected.state, 0, what);
}

inline std::string on(int ranks, const std::string& level = "") {
  return level + " on " + std::to_string(ranks) + " ranks";
}

/// A process group of this rank, some of whose collectives are late.
inline ProcessGroupPtr late_process_group(World& world) {
  using std::chrono::milliseconds;
  std::vector<Fault> faults;
  for (int nth = world.rank(); nth < 60; nth += 7)
    faults.push_back({.nth = nth, .fail = false, .delay = milliseconds(3)});
  return fault_process_group(world.process_group(), faults);
}

}  // namespace tessera::testing
