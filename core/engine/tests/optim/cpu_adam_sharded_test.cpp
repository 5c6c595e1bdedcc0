// CPUAdam on shards: the bits of one process, however ranks cut.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>

#include "engine/optim/param_state.h"
#include "support/models.h"
#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::cpu_adam_sharded_test {

using torch::Tensor;

constexpr int64_t kWidth = 37, kOut = 5;

// Weights and biases in groups with different options.
std::unique_ptr<torch::optim::Optimizer> make_adam(Net& net) {
  std::vector<Tensor> weights, rest;
  for (const auto& param : net.parameters()) (param.dim() > 1 ? weights : rest).push_back(param);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<CPUAdamOptions>(
                                   CPUAdamOptions(1e-2).weight_decay(0.1).adamw_mode(false)));
  groups.emplace_back(rest, std::make_unique<CPUAdamOptions>(CPUAdamOptions(3e-2)));
  return std::make_unique<CPUAdam>(groups);
}

TrainingRun adam_run() {
  TrainingRun run = sgd_run<Mlp>(kWidth, 3, kOut);
  run.make_optimizer = make_adam;
  run.steps = 3;
  return run;
}

// On a device LibTorch's operators step, whose bits depend on how tensors are cut, and which are
// not those of the host's kernel.
double unless_on_host(double tolerance) { return tests_on_host() ? 0 : tolerance; }

TEST(ShardedCPUAdam, GivesTheBitsOfOneProcessAtEveryLevelAndPlace) {
  const ScratchDirectory directory;
  for (const int ranks : {1, 2, 3}) {
    std::vector<ParityCase> cases;
    for (const ShardPlan& plan : with_each_partition({.unit_bytes = 6000})) {
      for (const auto offload : {Offload::kNone, Offload::kHost, Offload::kDirectory}) {
        // Whether LibTorch's kernels may be used does not matter.
        cases.push_back({.plan = plan,
                         .options = {.fused = offload == Offload::kNone},
                         .tolerance = ranks == 3 ? 1e-4 : unless_on_host(1e-4)});
        cases.back().plan.offload = offload;
        cases.back().plan.offload_directory = directory.path_for(offload);
      }
    }
    expect_parity_of_each(adam_run(), ranks, cases);
  }
}

// A model whose parameters are narrow and have no masters: state is wider than they are.
TrainingRun narrow_run() {
  TrainingRun run = in_dtype(sgd_run<Mlp>(kWidth, 2, kOut), torch::kBFloat16);
  run.make_optimizer = make_adam;
  return run;
}

TEST(ShardedCPUAdam, OfNarrowParametersKeepsFloatStateWhereItBelongs) {
  const ScratchDirectory directory;
  for (const int ranks : {1, 2}) {
    run_world(ranks, [&](World& world) {
      ShardedJob expected(narrow_run(), world, {.level = ShardLevel::kNone});
      expected.train(0, 3);
      int64_t numel = 0;
      for (const auto& param : expected.net->parameters()) numel += param.numel();
      EXPECT_EQ(expected.optimizer.memory().optimizer_state, 8 * numel);
      const auto dict = full_state_dict(expected.optimizer, -1);
      for (const auto offload : {Offload::kNone, Offload::kHost, Offload::kDirectory}) {
        for (const Partition partition : kPartitions) {
          const ShardPlan plan{.partition = partition,
                               .unit_bytes = 3000,
                               .offload = offload,
                               .offload_directory = directory.path_for(offload)};
          const std::string what = describe(ranks, plan);
          ShardedJob job(narrow_run(), world, plan);
          job.train(0, 3);
          expect_same_state(job.state(), expected.state(), unless_on_host(2e-2), what);
          const auto own = full_state_dict(job.optimizer, -1);
          ASSERT_EQ(own.state.size(), dict.state.size());
          for (const auto& [number, values] : dict.state) {
            for (const char* name : {"exp_avg", "exp_avg_sq"}) {
              const Tensor tensor = own.state.at(number).at(name).toTensor();
              EXPECT_EQ(tensor.scalar_type(), at::kFloat);
              const Tensor wanted = values.at(name).toTensor();
              EXPECT_TRUE(close_values(tensor, wanted, unless_on_host(2e-2))) << what << name;
            }
          }
        }
      }
    });
  }
}

// In the memory of the host, where any rank may read it at any time.
std::vector<NamedTensor> on_host(std::vector<NamedTensor> state) {
  for (NamedTensor& item : state) item.tensor = item.tensor.cpu();
  return state;
}
OptimizerStateDict on_host(OptimizerStateDict dict) {
  for (auto& [number, values] : dict.state)
    for (auto& [name, value] : values)
      if (value.isTensor()) value = value.toTensor().cpu();
  return dict;
}

TEST(ShardedCPUAdam, WholeNarrowStateLetsAnotherWorldTrainOn) {
  OptimizerStateDict dict;
  std::vector<NamedTensor> state, later;
  run_world(2, [&](World& world) {
    ShardedJob job(narrow_run(), world, {.unit_bytes = 3000});
    job.train(0, 2);
    auto own = on_host(full_state_dict(job.optimizer));
    const auto start = on_host(job.state());
    job.train(2, 4);
    const auto end = on_host(job.state());
    if (world.rank() == 0) dict = std::move(own), state = start, later = end;
  });
  run_world(2, [&](World& world) {
    ShardedJob job(narrow_run(), world,
                   {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam});
    job.train(7, 8);
    load_full_state_dict(job.optimizer, dict);
    job.sharded.load_full_state(state);
    job.train(2, 4);
    expect_same_state(job.state(), later, unless_on_host(2e-2), "trained on");
  });
}

TEST(ShardedCPUAdam, StepsMastersAsThoseOfOneProcess) {
  const TrainingRun run = narrow_run();
  run_world(2, [&](World& world) {
    std::vector<State> states;
    for (const ShardPlan& plan :
         at_each_level({.unit_bytes = 3000, .precision = {.master_dtype = at::kFloat}})) {
      ShardedJob job(run, world, plan);
      job.train(0, 3);
      states.push_back(job.state());
    }
    expect_same_states(states, states[0], 0, "levels");
  });
}

// Parameters that are DistTensors, with state placed like them or otherwise.
TEST(ShardedCPUAdam, StepsDistTensorsWhereTheirStateLies) {
  const auto values = [](uint64_t seed) {
    return seeded(seed, [] { return torch::randn({7, 5}, default_generator()); });
  };
  Tensor alone = values(1);
  CPUAdam plain({alone}, CPUAdamOptions(1e-2).weight_decay(0.1));
  for (const int step : {10, 11}) {
    alone.mutable_grad() = values(step);
    plain.step();
  }
  for (const int ranks : {1, 2, 3}) {
    for (const Placement& param_place : {Placement(Shard{0}), Placement(Replicate{})}) {
      for (const Placement& state_place :
           {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
        run_world(ranks, [&](World&) {
          const auto mesh = DeviceMesh::over_world();
          Tensor param = distribute(values(1), mesh, {param_place});
          CPUAdam adam({param}, CPUAdamOptions(1e-2).weight_decay(0.1));
          DistOptimizer optimizer(
              adam, {.place_state = [&](const std::string&, const Tensor&, const Tensor& state) {
                return redistribute(state, mesh, {state_place});
              }});
          for (const int step : {10, 11}) {
            param.mutable_grad() = distribute(values(step), mesh, {Replicate{}});
            optimizer.step();
          }
          EXPECT_TRUE(close_values(full_tensor(param), alone, unless_on_host(1e-5)))
              << ranks << " ranks";
          const ParamState state = read_param_state(adam, param);
          EXPECT_TRUE(placements_of(state.tensors.at("exp_avg")) == Placements{state_place});
        });
      }
    }
  }
}

}  // namespace tessera::testing::cpu_adam_sharded_test
