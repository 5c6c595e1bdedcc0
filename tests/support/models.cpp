#include "support/models.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/run_world.h"

namespace tessera::testing {

Mlp::Mlp(int64_t width, int64_t layers, int64_t out) {
  for (int64_t i = 0; i < layers; ++i) {
    fcs.push_back(register_module("fc" + std::to_string(i), torch::nn::Linear(width, width)));
  }
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  head = register_module("head", torch::nn::Linear(width, out));
}

torch::Tensor Mlp::forward(torch::Tensor x) {
  for (auto& fc : fcs) x = torch::gelu(fc->forward(x));
  return head->forward(norm->forward(x));
}

torch::Tensor rows_of(const torch::Tensor& batch, int rank, int size) {
  const int64_t rows = batch.size(0) / size;
  return batch.narrow(0, rank * rows, rows);
}

Batch global_batch(int64_t step, int64_t rows, int64_t in, int64_t out) {
  auto generator = at::detail::createCPUGenerator(1000 + step);
  const torch::Tensor x = torch::randn({rows, in}, generator);
  const torch::Tensor y = torch::randn({rows, out}, generator);
  return {on_test_device(x), on_test_device(y)};
}

std::vector<NamedTensor> plain_state(torch::nn::Module& module) {
  std::vector<NamedTensor> state;
  const auto add = [&](const auto& item) {
    state.push_back({item.key(), item.value().detach().clone().cpu()});
  };
  for (const auto& item : module.named_parameters()) add(item);
  for (const auto& item : module.named_buffers()) add(item);
  return state;
}

void for_each_pair(
    const std::vector<NamedTensor>& actual, const std::vector<NamedTensor>& expected,
    const std::string& what,
    const std::function<void(const NamedTensor& want, const torch::Tensor& got)>& compare) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const NamedTensor& want : expected) {
    const auto got = std::find_if(actual.begin(), actual.end(),
                                  [&](const NamedTensor& item) { return item.name == want.name; });
    ASSERT_NE(got, actual.end()) << what << ": no " << want.name;
    compare(want, got->tensor);
  }
}

void expect_same_state(const std::vector<NamedTensor>& actual,
                       const std::vector<NamedTensor>& expected, double tolerance,
                       const std::string& what) {
  for_each_pair(actual, expected, what, [&](const NamedTensor& want, const torch::Tensor& tensor) {
    const torch::Tensor got = tensor.cpu(), wanted = want.tensor.cpu();
    const bool same = tolerance == 0 ? torch::equal(got, wanted)
                                     : torch::allclose(got, wanted, tolerance, tolerance);
    EXPECT_TRUE(same) << what << ": " << want.name << " differs by "
                      << (got - wanted).abs().max().item<double>();
  });
}

torch::Tensor rank_loss(Net& net, const Batch& batch, int rank, int size, int step) {
  net.rank = rank;
  net.step = step;
  return torch::mse_loss(net.forward(rows_of(batch.x, rank, size)), rows_of(batch.y, rank, size));
}

std::vector<NamedTensor> train_alone(const TrainingRun& run, int ranks) {
  const auto net = run.make_net();
  const auto optimizer = run.make_optimizer(*net);
  for (int step = 0; step < run.steps; ++step) {
    const Batch batch = global_batch(step, run.rows, run.in, run.out);
    optimizer->zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      (rank_loss(*net, batch, rank, ranks, step) / ranks).backward();
    }
    optimizer->step();
  }
  return plain_state(*net);
}

std::vector<NamedTensor> train_sharded(const TrainingRun& run, World& world, const ShardPlan& plan,
                                       const ShardedOptimizerOptions& options) {
  const auto net = run.make_net();
  const auto inner = run.make_optimizer(*net);
  auto sharded = fully_shard(net, plan);
  ShardedOptimizer optimizer(sharded, *inner, options);
  for (int step = 0; step < run.steps; ++step) {
    const Batch batch = global_batch(step, run.rows, run.in, run.out);
    optimizer.zero_grad();
    rank_loss(*net, batch, world.rank(), world.size(), step).backward();
    optimizer.step();
  }
  return sharded.full_state();
}

double tolerance_of(int ranks) { return ranks == 3 ? 2e-6 : 0; }

void expect_parity(const TrainingRun& run, int ranks, const ShardPlan& plan,
                   const std::string& what, const ShardedOptimizerOptions& options,
                   double tolerance) {
  expect_parity_of_each(run, ranks, {{plan, what, options, tolerance}});
}

void expect_parity_of_each(const TrainingRun& run, int ranks,
                           const std::vector<ParityCase>& cases) {
  const auto expected = train_alone(run, ranks);
  // By case and rank.
  std::vector<std::vector<std::vector<NamedTensor>>> states(
      cases.size(), std::vector<std::vector<NamedTensor>>(ranks));
  run_world(ranks, [&](World& world) {
    for (size_t i = 0; i < cases.size(); ++i)
      states[i][world.rank()] = train_sharded(run, world, cases[i].plan, cases[i].options);
  });
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [plan, what, options, tolerance] = cases[i];
    expect_same_state(states[i][0], expected, tolerance < 0 ? tolerance_of(ranks) : tolerance,
                      what);
    for (const auto& state : states[i])
      expect_same_state(state, states[i][0], 0, what + ", replicas");
  }
}

void expect_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
  try {
    f();
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "no '" << part << "' in: " << message;
    }
    return;
  }
  ADD_FAILURE() << "no error; expected one with '" << (parts.empty() ? "" : parts[0]) << "'";
}

}  // namespace tessera::testing
