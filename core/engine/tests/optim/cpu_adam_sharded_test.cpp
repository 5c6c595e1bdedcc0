// CPUAdam on shards: the bits of one process, however ranks cut.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>

#include "engine/optim/param_state.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace cpu_adam_sharded_test {

using namespace testing;
using torch::Tensor;

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;
constexpr Partition kPartitions[] = {Partition::kFlatEven, Partition::kWholeParam};

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

std::string describe(int ranks, const ShardPlan& plan) {
  return fmt::format("{} ranks, level {}, partition {}, offload {}", ranks,
                     static_cast<int>(plan.level), static_cast<int>(plan.partition),
                     static_cast<int>(plan.offload));
}

TEST(ShardedCPUAdam, GivesTheBitsOfOneProcessAtEveryLevelAndPlace) {
  const ScratchDirectory directory;
  for (const int ranks : {1, 2, 3}) {
    std::vector<ParityCase> cases;
    for (const ShardLevel level : kAllLevels) {
      for (const Partition partition : kPartitions) {
        for (const auto offload : {Offload::kNone, Offload::kHost, Offload::kDirectory}) {
          const ShardPlan plan{.level = level,
                               .partition = partition,
                               .unit_bytes = 6000,
                               .offload = offload,
                               .offload_directory = directory.path_for(offload)};
          // Whether LibTorch's kernels may be used does not matter.
          cases.push_back({plan,
                           describe(ranks, plan),
                           {.fused = offload == Offload::kNone},
                           ranks == 3 ? 1e-4 : unless_on_host(1e-4)});
        }
      }
    }
    expect_parity_of_each(adam_run(), ranks, cases);
  }
}

// A model whose parameters are narrow and have no masters: state is wider than they are.
struct NarrowJob {
  NarrowJob(World& world, ShardPlan plan) : world(world) {
    net = seeded(3, [] { return std::make_shared<Mlp>(kWidth, 2, kOut); });
    net->to(torch::kBFloat16);
    inner = make_adam(*net);
    sharded = std::make_unique<Sharded<Mlp>>(fully_shard(net, plan));
    optimizer = std::make_unique<ShardedOptimizer>(*sharded, *inner);
  }
  void train(int first, int last) {
    for (int step = first; step < last; ++step) {
      const Batch batch = global_batch(step, kRows, kWidth, kOut);
      optimizer->zero_grad();
      const auto out =
          net->forward(rows_of(batch.x, world.rank(), world.size()).to(torch::kBFloat16));
      out.to(torch::kFloat).pow(2).mean().backward();
      optimizer->step();
    }
  }
  World& world;
  std::shared_ptr<Mlp> net;
  std::unique_ptr<torch::optim::Optimizer> inner;
  std::unique_ptr<Sharded<Mlp>> sharded;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

TEST(ShardedCPUAdam, OfNarrowParametersKeepsFloatStateWhereItBelongs) {
  const ScratchDirectory directory;
  for (const int ranks : {1, 2}) {
    run_world(ranks, [&](World& world) {
      NarrowJob expected(world, {.level = ShardLevel::kNone});
      expected.train(0, 3);
      int64_t numel = 0;
      for (const auto& param : expected.net->parameters()) numel += param.numel();
      EXPECT_EQ(expected.optimizer->memory().optimizer_state, 8 * numel);
      const auto dict = full_state_dict(*expected.optimizer, -1);
      for (const auto offload : {Offload::kNone, Offload::kHost, Offload::kDirectory}) {
        for (const Partition partition : kPartitions) {
          const ShardPlan plan{.partition = partition,
                               .unit_bytes = 3000,
                               .offload = offload,
                               .offload_directory = directory.path_for(offload)};
          const std::string what = describe(ranks, plan);
          NarrowJob job(world, plan);
          job.train(0, 3);
          expect_same_state(job.sharded->full_state(), expected.sharded->full_state(),
                            unless_on_host(2e-2), what);
          const auto own = full_state_dict(*job.optimizer, -1);
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
    NarrowJob job(world, {.unit_bytes = 3000});
    job.train(0, 2);
    auto own = on_host(full_state_dict(*job.optimizer));
    const auto start = on_host(job.sharded->full_state());
    job.train(2, 4);
    const auto end = on_host(job.sharded->full_state());
    if (world.rank() == 0) dict = std::move(own), state = start, later = end;
  });
  run_world(2, [&](World& world) {
    NarrowJob job(world, {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam});
    job.train(7, 8);
    load_full_state_dict(*job.optimizer, dict);
    job.sharded->load_full_state(state);
    job.train(2, 4);
    expect_same_state(job.sharded->full_state(), later, unless_on_host(2e-2), "trained on");
  });
}

TEST(ShardedCPUAdam, StepsMastersAsThoseOfOneProcess) {
  for (const ShardLevel level : kAllLevels) {
    run_world(2, [&](World& world) {
      std::vector<std::vector<NamedTensor>> states;
      for (const auto at_level : {ShardLevel::kNone, level}) {
        NarrowJob job(
            world,
            {.level = at_level, .unit_bytes = 3000, .precision = {.master_dtype = at::kFloat}});
        job.train(0, 3);
        states.push_back(job.sharded->full_state());
      }
      expect_same_state(states[1], states[0], 0, fmt::format("level {}", int(level)));
    });
  }
}

TEST(ShardedCPUAdam, SchedulersSetItsRate) {
  const auto train = [](Net& net, torch::optim::Optimizer& inner, ShardedOptimizer* sharded,
                        int rank, int size) {
    torch::optim::StepLR scheduler(inner, 2, 0.5);
    for (int step = 0; step < 5; ++step) {
      sharded ? sharded->zero_grad() : inner.zero_grad();
      rank_loss(net, global_batch(step, kRows, kWidth, kOut), rank, size, step).backward();
      sharded ? sharded->step() : (void)inner.step();
      scheduler.step();
    }
    EXPECT_DOUBLE_EQ(inner.param_groups()[1].options().get_lr(), 3e-2 * 0.25);
  };
  const auto make = [] { return seeded(7, [] { return std::make_shared<Mlp>(kWidth, 2, kOut); }); };
  const auto alone = make();
  train(*alone, *make_adam(*alone), nullptr, 0, 1);
  run_world(2, [&](World& world) {
    const auto net = make();
    const auto inner = make_adam(*net);
    auto sharded = fully_shard(net);
    ShardedOptimizer optimizer(sharded, *inner);
    train(*net, *inner, &optimizer, world.rank(), 2);
    expect_same_state(sharded.full_state(), plain_state(*alone), 1e-4, "scheduled");
  });
}

TEST(ShardedCPUAdam, AnOverflowOnOneRankSkipsTheStepOnAll) {
  for (const auto offload : {Offload::kNone, Offload::kHost}) {
    run_world(3, [&](World& world) {
      NarrowJob job(world, {.unit_bytes = 3000, .offload = offload});
      job.train(0, 1);
      const auto before = job.sharded->full_state();
      GradScaler scaler({.init_scale = 8});
      for (const bool overflows : {true, false}) {
        job.optimizer->zero_grad();
        Tensor x = torch::ones({2, kWidth}, at::dtype(at::kBFloat16).device(test_device()));
        auto loss = job.net->forward(x).to(at::kFloat).sum();
        if (overflows && world.rank() == 2) loss = loss * std::numeric_limits<float>::infinity();
        scaler.scale(loss).backward();
        EXPECT_EQ(scaler.step(*job.optimizer), !overflows);
        scaler.update();
        if (overflows) expect_same_state(job.sharded->full_state(), before, 0, "skipped");
      }
      EXPECT_EQ(job.optimizer->steps(), 2);
      for (const auto& item : job.inner->state())
        EXPECT_EQ(static_cast<CPUAdamParamState&>(*item.second).step(), 2);
    });
  }
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

}  // namespace cpu_adam_sharded_test
}  // namespace tessera
