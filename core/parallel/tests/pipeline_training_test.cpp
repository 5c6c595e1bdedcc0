// Pipelines of stages that are sharded and parallelized on their own ranks.

#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/pipeline.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/norm_mlp.h"
#include "support/run_world.h"

namespace tessera::pipeline_training_test {

using testing::NormMlp;
using testing::on_test_device;
namespace nn = torch::nn;

constexpr int kSteps = 3;

nn::Sequential some_model(int64_t stages) {
  manual_seed(6);
  nn::Sequential model;
  for (int64_t i = 0; i < stages; ++i) {
    NormMlp mlp;
    at::NoGradGuard no_grad;
    for (at::Tensor& each : mlp->parameters()) each.copy_(torch::randn_like(each) / 2);
    model->push_back("block" + std::to_string(i), on_test_device(mlp));
  }
  return model;
}

std::vector<std::vector<std::string>> names_of(int64_t stages) {
  std::vector<std::vector<std::string>> names;
  for (int64_t i = 0; i < stages; ++i) names.push_back({"block" + std::to_string(i)});
  return names;
}

at::Tensor loss_of(const at::Tensor& y) { return y.square().mean(); }
PipelineOptions options() {
  return {.loss = [](const StageTensors& out, const StageTensors&) { return loss_of(out[0]); }};
}

at::Tensor batch(int step, int64_t rows) {
  return on_test_device(
      torch::randn({rows, 6}, at::make_generator<at::CPUGeneratorImpl>(40 + step)));
}

std::map<std::string, at::Tensor> train_plain(int64_t stages, int64_t rows) {
  nn::Sequential model = some_model(stages);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(model->forward(batch(step, rows))).backward();
    optimizer.step();
  }
  std::map<std::string, at::Tensor> state;
  for (const auto& item : model->named_parameters()) state[item.key()] = item.value().detach();
  return state;
}

struct Mesh {
  int64_t pp = 2, dp = 1, tp = 1;
};

// Trains on a mesh, all rows of which get their part of the batch; expects the parameters of one
// process.
void expect_training(const Mesh& shape, const PipelineSchedule& schedule, ShardLevel level) {
  const int64_t rows = 12 * shape.dp;
  int64_t count = 0;
  for (int64_t p = 0; p < shape.pp; ++p) count += std::ssize(stages_at(schedule, p));
  const auto expected = train_plain(count, rows);
  const auto mesh = DeviceMesh::over_world({shape.pp, shape.dp, shape.tp}, {"pp", "dp", "tp"});
  const auto meshes = stage_meshes(mesh, mesh.dim("pp"));
  const auto place = mesh.coordinate()->at(0), line = mesh.coordinate()->at(1);
  nn::Sequential model = some_model(count);
  auto stages = cut_stages(*model, names_of(count));
  std::vector<std::unique_ptr<torch::optim::Optimizer>> inner;
  std::vector<ShardedOptimizer> optimizers;
  const auto mine = stages_at(schedule, place);
  for (const int64_t s : mine) {
    nn::Module& module = *stages[s].module;
    if (shape.tp > 1)
      parallelize_module(module, meshes[place].sub_mesh("tp"),
                         {{"block*.up", ColwiseParallel{}}, {"block*.down", RowwiseParallel{}}});
    stages[s].sharded = fully_shard(
        stages[s].module,
        {.level = level, .unit_bytes = 300, .process_group = mesh.process_group(mesh.dim("dp"))});
    inner.push_back(std::make_unique<torch::optim::AdamW>(module.parameters(),
                                                          torch::optim::AdamWOptions(0.01)));
    optimizers.emplace_back(*stages[s].sharded, *inner.back());
  }
  Pipeline pipeline(stages, schedule, meshes, options());
  for (int step = 0; step < kSteps; ++step) {
    for (ShardedOptimizer& each : optimizers) each.zero_grad();
    pipeline.step({batch(step, rows).narrow(0, 12 * line, 12)});
    for (ShardedOptimizer& each : optimizers) each.step();
  }
  EXPECT_EQ(pipeline.counts(), check_schedule(schedule)[place]);
  for (const int64_t s : mine) {
    for (const NamedTensor& each : stages[s].sharded->full_state())
      EXPECT_TRUE(testing::close_values(each.tensor, expected.at(each.name), 2e-5)) << each.name;
  }
}

class PipelineTraining : public ::testing::TestWithParam<ShardLevel> {};

TEST_P(PipelineTraining, OfTwoStagesByTensorParallelismByShardsIsThatOfOneProcess) {
  run_world(8, [](World&) {
    for (const auto& schedule : {one_f_one_b_schedule(2, 4), zero_bubble_schedule(2, 4)})
      expect_training({2, 2, 2}, schedule, GetParam());
  });
}

TEST_P(PipelineTraining, OfSeveralStagesAtAPlaceIsThatOfOneProcess) {
  for (const Transport transport : kTransports)
    run_over(transport, 4, [](World&) {
      expect_training({2, 2, 1}, interleaved_schedule(2, 2, 4), GetParam());
      expect_training({4, 1, 1}, zero_bubble_schedule(4, 6), GetParam());
      expect_training({2, 2, 1}, gpipe_schedule(2, 5), GetParam());
    });
}

INSTANTIATE_TEST_SUITE_P(AtLevels, PipelineTraining,
                         ::testing::Values(ShardLevel::kNone, ShardLevel::kOptimizerState,
                                           ShardLevel::kGradients, ShardLevel::kParameters));

TEST(PipelineOfShards, ReducesGradientsOncePerStep) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    const auto bytes_of = [&](const PipelineSchedule& schedule) {
      auto stages = cut_stages(*some_model(2), names_of(2));
      const int64_t place = mesh.coordinate()->at(0);
      stages[place].sharded =
          fully_shard(stages[place].module,
                      {.level = ShardLevel::kGradients, .process_group = mesh.process_group(1)});
      Pipeline pipeline(stages, schedule, stage_meshes(mesh), options());
      CommDebug debug;
      pipeline.step({batch(0, 12)});
      return debug.bytes("reduce_scatter");
    };
    const int64_t once = bytes_of(gpipe_schedule(2, 1));
    EXPECT_GT(once, 0);
    EXPECT_EQ(bytes_of(one_f_one_b_schedule(2, 4)), once);
    EXPECT_EQ(bytes_of(zero_bubble_schedule(2, 4)), once);
  });
}

// A stage that fails on all of its ranks, or on one of them.
TEST(PipelineOfShards, FailOnAllRanks) {
  for (const bool one_fails : {false, true}) {
    run_world(
        4,
        [&](World&) {
          const auto mesh = DeviceMesh::over_world({2, 2});
          auto stages = cut_stages(*some_model(2), names_of(2));
          const int64_t place = mesh.coordinate()->at(0);
          stages[place].sharded =
              fully_shard(stages[place].module, {.process_group = mesh.process_group(1)});
          bool fails = place == 1 && (!one_fails || mesh.coordinate()->at(1) == 1);
          stages[place].forward = [inner = stages[place].forward, &fails](const StageTensors& in) {
            TORCH_CHECK(!fails, "the forward fails");
            return inner(in);
          };
          Pipeline pipeline(stages, one_f_one_b_schedule(2, 4), stage_meshes(mesh), options());
          EXPECT_THROW(pipeline.step({batch(0, 12)}), c10::Error);
          if (one_fails) return;  // collectives of the others are no more than begun
          fails = false;
          stages[place].sharded->zero_grad();
          const at::Tensor again = pipeline.step({batch(0, 12)});
          EXPECT_TRUE(torch::equal(pipeline.step({batch(0, 12)}), again));
        },
        std::chrono::seconds(5));
    testing::forget_device_faults();
  }
}

// The bits of `fully_shard` alone on the same micro-batches.
TEST(PipelineOfShards, CopiesOfATiedParameterGetOneGradient) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    const auto gradient_of = [&](bool are_tied, int steps) {
      manual_seed(9);
      nn::Sequential model;
      nn::Linear first(6, 6), last(6, 6), middle(6, 6);
      at::Tensor shared = first->weight;
      last->weight.set_data(shared);  // equal values: two parameters, tied by hand
      model->push_back("first", first);
      model->push_back("middle", middle);
      model->push_back("last", last);
      on_test_device(model);
      const int64_t place = mesh.coordinate()->at(0);
      auto stages = cut_stages(*model, {{"first", "middle"}, {"last"}});
      if (are_tied) {
        stages[0].tied["weight"] = first->weight;
        stages[1].tied["weight"] = last->weight;
      }
      stages[place].sharded =
          fully_shard(stages[place].module, {.process_group = mesh.process_group(1)});
      Pipeline pipeline(stages, one_f_one_b_schedule(2, 3), stage_meshes(mesh), options());
      for (int step = 0; step < steps; ++step)
        pipeline.step({batch(static_cast<int>(mesh.coordinate()->at(1)), 6)});
      const at::Tensor gradient =
          stages[place].sharded->full_grad(place == 0 ? first->weight : last->weight);
      at::Tensor both = on_test_device(torch::zeros({2, 6, 6}));
      both[place].copy_(gradient);
      mesh.process_group(0)->all_reduce(both, ReduceOp::kSum, {"both"})->wait();
      return both;
    };
    const at::Tensor apart = gradient_of(false, 1), tied = gradient_of(true, 1);
    EXPECT_TRUE(torch::equal(tied[0], apart[0] + apart[1]));
    EXPECT_TRUE(torch::equal(tied[1], apart[0] + apart[1]));
    EXPECT_TRUE(testing::close_values(gradient_of(true, 2), 2 * tied, 1e-6));
  });
}

}  // namespace tessera::pipeline_training_test
