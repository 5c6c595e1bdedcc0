#include "support/models.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "support/sharded_job.h"

namespace tessera::testing {

std::vector<ShardPlan> at_each_level(const ShardPlan& plan) {
  std::vector<ShardPlan> plans(std::size(kAllLevels), plan);
  for (size_t i = 0; i < plans.size(); ++i) plans[i].level = kAllLevels[i];
  return plans;
}

std::vector<ShardPlan> with_each_partition(const ShardPlan& plan) {
  std::vector<ShardPlan> plans;
  for (ShardPlan at_level : at_each_level(plan)) {
    for (const Partition partition : kPartitions) {
      at_level.partition = partition;
      plans.push_back(at_level);
    }
  }
  return plans;
}

std::string describe(int ranks, const ShardPlan& plan) {
  return fmt::format("{} ranks, level {}, partition {}, units of {}, offload {}", ranks,
                     int(plan.level), int(plan.partition), plan.unit_bytes.value_or(-1),
                     int(plan.offload));
}

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

State plain_state(torch::nn::Module& module) {
  State state;
  const auto add = [&](const auto& item) {
    state.push_back({item.key(), item.value().detach().clone().cpu()});
  };
  for (const auto& item : module.named_parameters()) add(item);
  for (const auto& item : module.named_buffers()) add(item);
  return state;
}

void for_each_pair(
    const State& actual, const State& expected, const std::string& what,
    const std::function<void(const NamedTensor& want, const torch::Tensor& got)>& compare) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const NamedTensor& want : expected) {
    const auto got = std::find_if(actual.begin(), actual.end(),
                                  [&](const NamedTensor& item) { return item.name == want.name; });
    ASSERT_NE(got, actual.end()) << what << ": no " << want.name;
    compare(want, got->tensor);
  }
}

void expect_same_state(const State& actual, const State& expected, double tolerance,
                       const std::string& what) {
  for_each_pair(actual, expected, what, [&](const NamedTensor& want, const torch::Tensor& tensor) {
    const torch::Tensor got = tensor.cpu(), wanted = want.tensor.cpu();
    const bool same = tolerance == 0 ? torch::equal(got, wanted)
                                     : torch::allclose(got, wanted, tolerance, tolerance);
    EXPECT_TRUE(same) << what << ": " << want.name << " differs by "
                      << (got - wanted).abs().max().item<double>();
  });
}

TrainingRun in_dtype(TrainingRun run, torch::Dtype dtype) {
  run.make_net = [make_net = run.make_net, dtype] {
    const auto net = make_net();
    net->to(dtype);
    return net;
  };
  return run;
}

torch::Tensor rank_loss(Net& net, const Batch& batch, int rank, int size, int step) {
  net.rank = rank;
  net.step = step;
  const torch::Tensor y = net.forward(rows_of(batch.x, rank, size).to(net.dtype()));
  return torch::mse_loss(y.to(torch::kFloat), rows_of(batch.y, rank, size));
}

State train_alone(const TrainingRun& run, int ranks) {
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

State train_sharded(const TrainingRun& run, World& world, const ShardPlan& plan,
                    const ShardedOptimizerOptions& options) {
  ShardedJob job(run, world, plan, options);
  job.train(0, run.steps);
  return job.state();
}

double tolerance_of(int ranks) { return ranks == 3 ? 2e-6 : 0; }

void expect_same_states(const std::vector<State>& of_ranks, const State& expected, double tolerance,
                        const std::string& what) {
  expect_same_state(of_ranks[0], expected, tolerance, what);
  for (const State& state : of_ranks) expect_same_state(state, of_ranks[0], 0, what + ", replicas");
}

void expect_parity(const TrainingRun& run, int ranks, const ShardPlan& plan,
                   const std::string& what, const ShardedOptimizerOptions& options,
                   double tolerance) {
  expect_parity_of_each(run, ranks, {{plan, what, options, tolerance}});
}

std::vector<std::vector<State>> train_each(const TrainingRun& run, int ranks,
                                           const std::vector<ParityCase>& cases,
                                           std::optional<Transport> transport) {
  std::vector<std::vector<State>> states(cases.size(), std::vector<State>(ranks));
  const auto on_rank = [&](World& world) {
    for (size_t i = 0; i < cases.size(); ++i)
      states[i][world.rank()] = train_sharded(run, world, cases[i].plan, cases[i].options);
  };
  run_world(ranks, on_rank, std::chrono::seconds(30), transport);
  return states;
}

void expect_parity_of_each(const TrainingRun& run, int ranks, const std::vector<ParityCase>& cases,
                           std::optional<Transport> transport) {
  expect_each_has(train_alone(run, ranks), run, ranks, cases, transport);
}

void expect_each_has(const State& expected, const TrainingRun& run, int ranks,
                     const std::vector<ParityCase>& cases, std::optional<Transport> transport) {
  const auto states = train_each(run, ranks, cases, transport);
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [plan, what, options, tolerance] = cases[i];
    expect_same_states(states[i], expected, tolerance < 0 ? tolerance_of(ranks) : tolerance,
                       what + " " + describe(ranks, plan));
  }
}

std::vector<ParityCase> cases_of(const std::vector<ShardPlan>& plans, double tolerance) {
  std::vector<ParityCase> cases;
  for (const ShardPlan& plan : plans) cases.push_back({.plan = plan, .tolerance = tolerance});
  return cases;
}

void on_worlds(const std::vector<int>& sizes, const std::vector<ShardPlan>& plans,
               const std::function<void(World&, const ShardPlan&)>& f,
               std::optional<Transport> transport) {
  for (const int size : sizes) {
    const auto on_rank = [&](World& world) {
      for (const ShardPlan& plan : plans) {
        SCOPED_TRACE(fmt::format("rank {} of {}", world.rank(), describe(size, plan)));
        f(world, plan);
      }
    };
    run_world(size, on_rank, std::chrono::seconds(30), transport);
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
