// Param groups that the user changes after the optimizer was wrapped.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::param_groups_test {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

constexpr int kThawsAt = 2, kSteps = 5;

TrainingRun half_frozen_run() {
  TrainingRun run = sgd_run<Mlp>(37, 3, 5);
  run.make_net = [make_net = run.make_net] {
    const auto net = make_net();
    for (auto& layer : static_cast<Mlp&>(*net).fcs)
      for (auto& parameter : layer->parameters()) parameter.set_requires_grad(false);
    return net;
  };
  run.make_optimizer = [](Net& net) {
    std::vector<torch::Tensor> trained;
    for (auto& parameter : net.parameters())
      if (parameter.requires_grad()) trained.push_back(parameter);
    return std::make_unique<AdamW>(trained, AdamWOptions(1e-2));
  };
  return run;
}

// All ranks see the same rows, so that means are those of one process.
struct Job : ShardedJob<Mlp> {
  explicit Job(World& world, const ShardPlan& plan = {.unit_bytes = 6000},
               const ShardedOptimizerOptions& options = {.fused = false})
      : ShardedJob(half_frozen_run(), world, plan, options) {
    sees_all_rows = true;
  }
};

std::vector<torch::Tensor> frozen_of(Mlp& net) {
  std::vector<torch::Tensor> parameters;
  for (auto& layer : net.fcs)
    for (auto& parameter : layer->parameters()) parameters.push_back(parameter);
  return parameters;
}

void thaw(Mlp& net, torch::optim::Optimizer& optimizer) {
  const auto parameters = frozen_of(net);
  for (const auto& parameter : parameters) parameter.set_requires_grad(true);
  optimizer.add_param_group(
      OptimizerParamGroup(parameters, std::make_unique<AdamWOptions>(AdamWOptions(3e-3))));
}

std::vector<NamedTensor> thawed_alone() {
  const TrainingRun run = half_frozen_run();
  const auto net = std::static_pointer_cast<Mlp>(run.make_net());
  const auto inner = run.make_optimizer(*net);
  for (int step = 0; step < kSteps; ++step) {
    if (step == kThawsAt) thaw(*net, *inner);
    inner->zero_grad();
    rank_loss(*net, global_batch(step, run.rows, run.in, run.out), 0, 1, step).backward();
    inner->step();
  }
  return plain_state(*net);
}

TEST(ParamGroups, AnAddedOneIsSteppedAsInOneProcess) {
  const State expected = thawed_alone();
  on_worlds({1, 2, 3, 4}, at_each_level({.unit_bytes = 6000}),
            [&](World& world, const ShardPlan& plan) {
              Job job(world, plan);
              for (int step = 0; step < kSteps; ++step) {
                if (step == kThawsAt) thaw(*job.net, job.optimizer.inner());
                job.step(step);
              }
              expect_same_state(job.state(), expected, tolerance_of(world.size()), "thawed");
            });
}

TEST(ParamGroups, AnAddedOneIsInCheckpoints) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    State states[2];
    for (const bool resumes : {false, true}) {
      Job job(world);
      thaw(*job.net, job.optimizer.inner());
      // No step has seen the new group yet.
      if (resumes) load_checkpoint(scratch / "at_2", job.sharded, &job.optimizer);
      for (int step = resumes ? 2 : 0; step < kSteps; ++step) {
        if (step == 2 && !resumes) save_checkpoint(scratch / "at_2", job.sharded, &job.optimizer);
        job.step(step);
      }
      states[resumes] = job.state();
    }
    expect_same_state(states[1], states[0], 0, "resumed");
  });
}

TEST(ParamGroups, AnAddedOneIsClippedAndOffloaded) {
  run_world(2, [&](World& world) {
    Job job(world, {.unit_bytes = 6000, .offload = Offload::kHost}, {.max_grad_norm = 0.1});
    thaw(*job.net, job.optimizer.inner());
    job.train(0, kSteps);
    // Two moments of all parameters, of which this rank has half; all are offloaded.
    int64_t numel = 0;
    for (const auto& parameter : job.net->parameters()) numel += parameter.numel();
    EXPECT_GE(job.optimizer.memory().offloaded, 3 * 4 * numel / 2 * 0.9);
    EXPECT_EQ(job.optimizer.memory().optimizer_state, 0);
  });
}

TEST(ParamGroups, AddedParametersMustBeTheModelsAndInNoOtherGroup) {
  run_world(2, [&](World& world) {
    Job job(world, {}, {});
    job.backward(0);
    torch::optim::Optimizer& inner = job.optimizer.inner();
    inner.add_param_group(OptimizerParamGroup({job.net->head->weight}));
    expect_error([&] { job.optimizer.step(); }, {"must be in one param group", "head.weight"});
    inner.param_groups().pop_back();
    inner.add_param_group(OptimizerParamGroup({torch::ones({3}, torch::requires_grad())}));
    expect_error([&] { job.optimizer.step(); }, {"must be the model's", "param group 1"});
    inner.param_groups().pop_back();
    job.optimizer.step();
  });
}

TEST(ParamGroups, ARemovedParameterIsLeftAlone) {
  run_world(2, [&](World& world) {
    ShardedJob job(sgd_run<Mlp>(37, 3, 5), world);
    const auto before = job.state();
    job.inner->param_groups()[0].params().erase(job.inner->param_groups()[0].params().begin());
    job.backward(0);
    job.optimizer.step();
    const auto after = job.state();
    EXPECT_TRUE(same_values(after[0].tensor, before[0].tensor)) << before[0].name;
    EXPECT_FALSE(same_values(after[1].tensor, before[1].tensor)) << before[1].name;
  });
}

}  // namespace tessera::testing::param_groups_test
