// Placing the tensors of a module, and partitions that are refused.

#include <gtest/gtest.h>
#include <tessera/parallel/distribute_module.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "support/error_of.h"
#include "support/run_world.h"

namespace tessera::distribute_module_test {

namespace nn = torch::nn;

struct PairImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(first(x))) * scale; }
  nn::Linear first = register_module("first", nn::Linear(4, 6));
  nn::Linear second = register_module("second", nn::Linear(6, 4));
  at::Tensor scale = register_buffer("scale", torch::ones({4}));
};
TORCH_MODULE(Pair);

using testing::error_of;

// Expects an error on all ranks, and that the module's registered tensors are unchanged.
void expect_refused(Pair& pair, const DeviceMesh& mesh, const PartitionFn& partition,
                    const std::string& name) {
  const std::string text = error_of([&] { distribute_module(*pair, mesh, partition); });
  for (const std::string& word : {"'" + name + "'", std::string("assigned"),
                                  std::string("distribute_("), std::string("in place")})
    testing::expect_contains(text, {word});
  for (const auto& item : pair->named_parameters()) EXPECT_FALSE(is_dist(item.value()));
}

TEST(DistributeModule, AMemberThatIsAssignedToIsAnErrorOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      Pair weight, bias, buffer, from_root;
      expect_refused(
          weight, mesh,
          [](const std::string& name, nn::Module& module, const DeviceMesh& mesh) {
            auto* linear = module.as<nn::LinearImpl>();
            if (name == "second") linear->weight = distribute(linear->weight, mesh, {Shard{1}});
          },
          "second.weight");
      expect_refused(
          bias, mesh,
          [](const std::string& name, nn::Module& module, const DeviceMesh&) {
            if (name == "first") module.as<nn::LinearImpl>()->bias = torch::zeros({6});
          },
          "first.bias");
      expect_refused(
          buffer, mesh,
          [](const std::string& name, nn::Module& module, const DeviceMesh& mesh) {
            auto* pair = module.as<PairImpl>();
            if (name.empty()) pair->scale = distribute(pair->scale, mesh, {});
          },
          "scale");
      // Also for a member of another module than the one that the partition was called for.
      expect_refused(
          from_root, mesh,
          [](const std::string& name, nn::Module& module, const DeviceMesh& mesh) {
            if (!name.empty()) return;
            at::Tensor& own = module.as<PairImpl>()->first->weight;
            own = distribute(own, mesh, {Shard{0}});
          },
          "first.weight");
    });
  }
}

TEST(DistributeModule, OneRankThatAssignsIsAnErrorOnAllRanks) {
  run_world(2, [](World& world) {
    Pair pair;
    expect_refused(
        pair, DeviceMesh::over_world(),
        [&](const std::string& name, nn::Module& module, const DeviceMesh& mesh) {
          auto* linear = module.as<nn::LinearImpl>();
          if (name == "second" && world.rank() == 1)
            linear->weight = distribute(linear->weight, mesh, {Shard{1}});
        },
        "second.weight");
  });
}

TEST(DistributeModule, PlacingInPlaceAndReplacingModulesAreFine) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    Pair pair;
    const at::Tensor kept = pair->first->weight;
    distribute_module(*pair, mesh,
                      [](const std::string& name, nn::Module& module, const DeviceMesh& mesh) {
                        if (name == "first") {
                          auto* linear = module.as<nn::LinearImpl>();
                          at::Tensor same = linear->weight;
                          distribute_(same, mesh, {Shard{0}});
                          linear->weight = same;
                        }
                        if (!name.empty()) return;
                        auto* pair = module.as<PairImpl>();
                        pair->second = pair->replace_module("second", nn::Linear(6, 4));
                      });
    EXPECT_EQ(placements_of(kept), Placements{Shard{0}});
    for (const auto& item : pair->named_parameters()) EXPECT_TRUE(is_dist(item.value()));
    EXPECT_TRUE(is_dist(pair->second->weight));
  });
}

}  // namespace tessera::distribute_module_test
