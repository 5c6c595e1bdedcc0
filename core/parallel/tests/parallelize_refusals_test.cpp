// Plans that do not fit the model are errors on all ranks.

#include <gtest/gtest.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/parallel/parallelize.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/tests/llama.h"
#include "support/error_of.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::parallelize_refusals_test {

using namespace testing::llama;

using testing::error_of;

void expect_refused(nn::Module& module, const ParallelPlan& plan,
                    const std::vector<std::string>& words) {
  const std::string text =
      error_of([&] { parallelize_module(module, DeviceMesh::over_world(), plan); });
  for (const std::string& word : words) testing::expect_contains(text, {word});
  for (const at::Tensor& parameter : module.parameters()) EXPECT_FALSE(is_dist(parameter));
}

TEST(ParallelizeModuleRefusals, PlansThatDoNotFitAreErrorsOnAllRanksBeforeAnythingChanges) {
  for (const int ranks : {1, 2}) {
    run_world(ranks, [](World&) {
      Llama llama;
      const ColwiseParallel colwise;
      expect_refused(*llama, {{"output", colwise}, {"layers.*.atention.wq", colwise}},
                     {"'layers.*.atention.wq' matches none", "'tok_embeddings'"});
      expect_refused(*llama, {{"*.wq", colwise}}, {"matches none"});  // one part of a name only
      expect_refused(*llama, {{"norm", colwise}},
                     {"ColwiseParallel", "'norm'", "torch::nn::Linear"});
      expect_refused(*llama, {{"layers.0", RowwiseParallel{}}}, {"RowwiseParallel", "'layers.0'"});
      expect_refused(*llama, {{"**.wq", colwise}, {"layers.*.attention.w?", colwise}},
                     {"'layers.0.attention.wq'", "'**.wq'", "'layers.*.attention.w?'"});
      expect_refused(*llama, {{"layers.*.attention", PrepareModuleInput{}}},
                     {"'layers.0.attention'", "no hooks", "name the inner modules", "handle"});
      expect_refused(*llama, {{"", PrepareModuleOutput{}}}, {"the module itself", "handle"});
    });
  }
}

struct TiedLinearImpl : nn::LinearImpl {
  explicit TiedLinearImpl(const at::Tensor& tied)
      : LinearImpl(nn::LinearOptions(tied.size(1), tied.size(0)).bias(false)) {
    weight = parameters_["weight"] = tied;
  }
};
TORCH_MODULE(TiedLinear);

struct TiedModelImpl : nn::Module {
  at::Tensor forward(const at::Tensor& tokens) { return head(embedding(tokens)); }
  nn::Embedding embedding = register_module("embedding", nn::Embedding(8, 6));
  TiedLinear head = register_module("head", TiedLinear(embedding->weight));
};
TORCH_MODULE(TiedModel);

TEST(ParallelizeModuleRefusals, ModulesThatShareAWeightMustPlaceItAlike) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    TiedModel model, plain;  // in host memory, as moving it would part the two
    {
      torch::NoGradGuard no_grad;
      plain->embedding->weight.copy_(model->embedding->weight);
    }
    expect_refused(*model, {{"embedding", ColwiseParallel{}}, {"head", ColwiseParallel{}}},
                   {"'embedding'", "'head'", "share a parameter", "Shard(1) and Shard(0)"});
    // The vocabulary is cut in both, and each has functions of its own.
    parallelize_module(*model, mesh,
                       {{"embedding", RowwiseParallel{}}, {"head", ColwiseParallel{}}});
    const at::Tensor tokens = torch::arange(8).view({2, 4});
    const at::Tensor logits = model(tokens), expected = plain(tokens);
    EXPECT_EQ(placements_of(logits), Placements{Shard{2}});
    EXPECT_TRUE(torch::allclose(full_tensor(logits), expected, 1e-4, 1e-5));
    logits.square().sum().backward();
    expected.square().sum().backward();
    EXPECT_TRUE(torch::allclose(full_tensor(model->head->weight.grad()), plain->head->weight.grad(),
                                1e-3, 1e-4));
    // One module under two names.
    nn::Linear linear = make_linear(6, 6);
    nn::Sequential twice(linear, linear);
    parallelize_module(*twice, mesh, {{"*", ColwiseParallel{}}});
    EXPECT_EQ(placements_of(linear->weight), Placements{Shard{0}});
  });
}

TEST(ParallelizeModuleRefusals, OneRanksPlanThatDiffersIsAnErrorOnAll) {
  run_world(3, [](World& world) {
    Llama llama;
    ParallelPlan plan = tensor_plan();
    if (world.rank() == 1) plan[2].second = RowwiseParallel{.output = Shard{1}};
    expect_refused(*llama, plan, {"same plan", "Shard(1)"});
    plan = tensor_plan();
    if (world.rank() == 1) plan[0].first = "nothing";
    expect_refused(*llama, plan, {"'nothing' matches none"});
  });
}

TEST(ParallelizeModuleRefusals, MeshesOfSeveralDimsNeedTheDim) {
  run_world(2, [](World&) {
    Llama llama;
    const auto mesh = DeviceMesh::over_world({2, 1});
    for (const auto& [dim, word] : std::vector<std::pair<std::optional<int64_t>, std::string>>{
             {std::nullopt, "needs `mesh_dim`"}, {2, "got 2"}}) {
      const std::string text =
          error_of([&] { parallelize_module(*llama, mesh, tensor_plan(), dim); });
      testing::expect_contains(text, {word});
    }
  });
}

TEST(ParallelizeModuleRefusals, AModuleIsParallelizedOnce) {
  run_world(2, [](World&) {
    Llama llama;
    const auto mesh = DeviceMesh::over_world();
    parallelize_module(*llama, mesh, {{"output", ColwiseParallel{}}});
    const std::string text = error_of([&] {
      parallelize_module(*llama, mesh, {{"output", RowwiseParallel{}}});
    });
    testing::expect_contains(text, {"set_module_functions"});
    EXPECT_EQ(placements_of(llama->output->weight), Placements{Shard{0}});
    parallelize_module(*llama, mesh, {{"norm", SequenceParallel{}}});
    set_module_functions(*llama->output, {});
    parallelize_module(*llama, mesh, {{"output", RowwiseParallel{}}});
    EXPECT_EQ(placements_of(llama->output->weight), Placements{Shard{1}});
  });
}

}  // namespace tessera::parallelize_refusals_test
