// The elements that a rank has, as ranges, against those of a distributed tensor of indices.

#include "parallel/owned_runs.h"

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/run_world.h"

namespace tessera::owned_runs_test {

void expect_as_distributed(const DeviceMesh& mesh, const std::vector<int64_t>& sizes,
                           const Placements& placements) {
  SCOPED_TRACE(to_string(placements));
  const at::Tensor indices = torch::arange(c10::multiply_integers(sizes)).view(sizes);
  const at::Tensor dist = distribute(indices, mesh, placements);
  const at::Tensor expected = to_local(dist).contiguous().view(-1);
  OwnedRuns runs({mesh, placements_of(dist)}, sizes);
  std::vector<int64_t> owned;
  int64_t last = -1;
  while (const auto run = runs.next()) {
    ASSERT_GT(run->size(), 0);
    ASSERT_GT(run->begin, last);
    for (last = run->begin; last < run->end; ++last) owned.push_back(last);
    --last;
  }
  EXPECT_TRUE(torch::equal(torch::tensor(owned, torch::kLong), expected)) << expected;
}

TEST(OwnedRuns, AreThePartsOfALine) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 6, 7}, {2, 3, 4}, {1, 9, 1}}) {
        for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}),
                                           Placement(Shard{1}), Placement(Shard{2})})
          expect_as_distributed(mesh, sizes, {placement});
      }
      expect_as_distributed(mesh, {7}, {Shard{0}});
      expect_as_distributed(mesh, {}, {});
      expect_as_distributed(mesh, {0, 3}, {Shard{1}});
    });
  }
}

TEST(OwnedRuns, HaveBlocksOfSplitDims) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    expect_as_distributed(mesh, {12, 3}, {Shard{0, 3}});
    expect_as_distributed(mesh, {3, 8}, {Shard{1, 2}});
    expect_as_distributed(mesh, {2, 12, 5}, {Shard{1, 3}});
  });
}

TEST(OwnedRuns, AreThePartsOfASquare) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    for (const Placements& placements : std::vector<Placements>{{Shard{0}, Shard{1}},
                                                                {Shard{1}, Shard{0}},
                                                                {Shard{1}, Shard{1}},
                                                                {Shard{2}, Replicate{}}})
      expect_as_distributed(mesh, {5, 7, 3}, placements);
    expect_as_distributed(mesh, {5, 12, 4}, {Shard{0}, Shard{1, 3}});
    expect_as_distributed(mesh, {8, 12}, {Shard{0, 2}, Shard{1, 3}});
  });
}

}  // namespace tessera::owned_runs_test
