#pragma once

// Trains small models with and without `group_sharded_parallel`, for the tests of this folder.
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/error_of.h"
#include "support/models.h"

namespace tessera::testing {

constexpr int64_t kIn = 24, kOut = 6, kRows = 12;

/// Paddle's test model, smaller: three Linear layers.
struct PaddleMlp : Net {
  explicit PaddleMlp(int64_t width = 40)
      : fc1(register_module("fc1", torch::nn::Linear(kIn, width))),
        fc2(register_module("fc2", torch::nn::Linear(width, width))),
        fc3(register_module("fc3", torch::nn::Linear(width, kOut))) {}
  torch::Tensor forward(torch::Tensor x) override {
    return fc3->forward(torch::tanh(fc2->forward(torch::tanh(fc1->forward(x)))));
  }
  torch::nn::Linear fc1, fc2, fc3;
};

/// Values that depend on the seed alone. (The default generator is one for all ranks of a process.)
template <class M>
std::shared_ptr<M> with_values(std::shared_ptr<M> model, uint64_t seed = 7) {
  torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& param : model->parameters()) param.copy_(0.2 * torch::randn(param.sizes(), generator));
  return on_test_device(model);
}

using MakeNet = std::function<std::shared_ptr<Net>()>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)>;

inline std::shared_ptr<Net> make_mlp() { return with_values(std::make_shared<PaddleMlp>()); }

inline std::unique_ptr<torch::optim::Optimizer> make_sgd(Net& net) {
  return std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.1));
}

inline std::unique_ptr<torch::optim::Optimizer> make_adamw(Net& net) {
  return std::make_unique<torch::optim::AdamW>(net.parameters(),
                                               torch::optim::AdamWOptions(1e-3).weight_decay(1e-5));
}

/// A training setup, for one process and for sharded runs alike.
struct Training {
  MakeNet net = make_mlp;
  MakeOptimizer optimizer = make_sgd;
  paddle::GroupShardedOptions options = {.segment_size = 0};
  int steps = 4;
  int backwards = 1;  ///< per step, on equal parts of the batch
  double clip = 0;    ///< largest norm of the gradients; 0: not clipped
  std::function<void(Net&, int)> before_step = [](Net&, int) {};
};

/// Computes the gradients of one step: `backwards` times, each on a part of this rank's rows.
template <class Forward>
void accumulate(const Training& training, int step, int rank, int size, Forward&& forward) {
  const Batch batch = global_batch(step, kRows, kIn, kOut);
  const auto x = rows_of(batch.x, rank, size), y = rows_of(batch.y, rank, size);
  for (int part = 0; part < training.backwards; ++part) {
    const auto out = forward(rows_of(x, part, training.backwards));
    (torch::mse_loss(out, rows_of(y, part, training.backwards)) / training.backwards).backward();
  }
}

inline std::vector<NamedTensor> train_alone(const Training& training) {
  const auto net = training.net();
  const auto optimizer = training.optimizer(*net);
  for (int step = 0; step < training.steps; ++step) {
    training.before_step(*net, step);
    optimizer->zero_grad();
    accumulate(training, step, 0, 1, [&](const torch::Tensor& x) { return net->forward(x); });
    if (training.clip > 0) torch::nn::utils::clip_grad_norm_(net->parameters(), training.clip);
    optimizer->step();
  }
  return plain_state(*net);
}

inline std::vector<NamedTensor> train_as_rank(const World& world, const std::string& level,
                                              const Training& training) {
  const auto net = training.net();
  const auto inner = training.optimizer(*net);
  auto [model, optimizer, scaler] =
      paddle::group_sharded_parallel(net, *inner, level, training.options);
  for (int step = 0; step < training.steps; ++step) {
    training.before_step(*net, step);
    optimizer.clear_grad();
    accumulate(training, step, world.rank(), world.size(),
               [&model = model](const torch::Tensor& x) { return model(x); });
    if (training.clip > 0) optimizer.clip_grad_norm_(training.clip);
    optimizer.step();
  }
  return model.full_state();
}

/// Trains on `ranks` ranks, expects the same bits on all of them, and returns the state.
inline std::vector<NamedTensor> train_sharded(int ranks, const std::string& level,
                                              const Training& training) {
  std::vector<std::vector<NamedTensor>> states(ranks);
  run_world(ranks,
            [&](World& world) { states[world.rank()] = train_as_rank(world, level, training); });
  for (const auto& state : states) {
    expect_same_state(state, states[0], 0,
                      level + " on " + std::to_string(ranks) + " ranks: replicas");
  }
  return states[0];
}

/// Expects that every level gives the result of one process, on 1, 2 and 3 ranks.
inline void expect_parity(const Training& training, double tolerance = 2e-6) {
  const auto expected = train_alone(training);
  for (const std::string level : {"os", "os_g", "p_g_os"}) {
    for (const int ranks : {1, 2, 3}) {
      expect_same_state(train_sharded(ranks, level, training), expected, tolerance,
                        level + " on " + std::to_string(ranks) + " ranks");
    }
  }
}

/// The message of the `Error` that `f` throws.
template <class Error, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace tessera::testing
