// The last gather is kept for the operators that follow, and never hides a write.

#include <gtest/gtest.h>
#include <tessera/dist_debug.h>
#include <tessera/dist_tensor.h>
#include <torch/torch.h>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::testing {
namespace kept_gather_test {

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

// Rows, which a product with the columns of `weight` needs whole.
struct Rows {
  explicit Rows(const DeviceMesh& mesh)
      : plain(numbers({4, 6}, 1)),
        plain_weight(numbers({6, 8}, 2)),
        dist(distribute(plain, mesh, {Shard{0}}) * 1),
        weight(distribute(plain_weight, mesh, {Shard{1}})) {}

  // Expects the product of one process, and this number of gathers.
  void expect_product(int64_t gathers) const {
    const CommDebug debug;
    const at::Tensor product = torch::mm(dist, weight);
    EXPECT_EQ(debug.calls("all_gather"), gathers);
    EXPECT_TRUE(torch::allclose(full_tensor(product), torch::mm(plain, plain_weight), 1e-4, 1e-5));
  }
  at::Tensor plain, plain_weight, dist, weight;
};

TEST(KeptGathers, ServeTheNextReadersAndTheirTransposes) {
  for (const int ranks : {2, 3}) {
    run_world(ranks, [](World&) {
      const Rows rows(DeviceMesh::over_world());
      rows.expect_product(1);
      rows.expect_product(0);
      const CommDebug debug;
      const at::Tensor product = torch::mm(rows.weight.t(), rows.dist.t());
      EXPECT_EQ(debug.calls(), 0);
      EXPECT_TRUE(torch::allclose(full_tensor(product),
                                  torch::mm(rows.plain, rows.plain_weight).t(), 1e-4, 1e-5));
      const Rows others(DeviceMesh::over_world());
      others.expect_product(1);
      rows.expect_product(1);
    });
  }
}

TEST(KeptGathers, AreDoneAgainAfterWrites) {
  run_world(2, [](World&) {
    Rows rows(DeviceMesh::over_world());
    rows.expect_product(1);
    rows.dist.mul_(2);
    rows.plain.mul_(2);
    rows.expect_product(1);
    rows.dist.select(1, 3).zero_();
    rows.plain.select(1, 3).zero_();
    rows.expect_product(1);
    rows.expect_product(0);
  });
}

TEST(KeptGathers, AreNotKeptOfMemoryThatTheUserHas) {
  run_world(2, [](World&) {
    Rows rows(DeviceMesh::over_world());
    rows.expect_product(1);
    const at::Tensor part = to_local(rows.dist);
    for (int step = 0; step < 3; ++step) {
      part.add_(1);
      rows.plain.add_(1);
      rows.expect_product(1);
    }
    // Nor of a tensor that was made of the user's.
    const at::Tensor memory =
        to_local(distribute(rows.plain, DeviceMesh::over_world(), {Shard{0}}));
    rows.dist = from_local(memory, DeviceMesh::over_world(), {Shard{0}});
    for (int step = 0; step < 3; ++step) {
      rows.expect_product(1);
      memory.mul_(0.5);
      rows.plain.mul_(0.5);
    }
  });
}

}  // namespace kept_gather_test
}  // namespace tessera::testing
