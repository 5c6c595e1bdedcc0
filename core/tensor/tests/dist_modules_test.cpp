// Modules of LibTorch, unchanged, on parameters that are DistTensors.

#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>
#include <limits>

#include "support/counted.h"
#include "support/error_of.h"
#include "support/norm_mlp.h"
#include "support/run_world.h"

namespace tessera::testing::dist_modules_test {

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

void train(NormMlp& mlp, torch::optim::Optimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    mlp->forward(numbers({4, 6}, step)).square().mean().backward();
    optimizer.step();
  }
}

template <class Optimizer, class Options>
void expect_trains_as_one_process(int ranks, const Options& options) {
  run_world(ranks, [&](World&) {
    NormMlp plain = make_norm_mlp(), dist = make_norm_mlp();
    shard_columns_then_rows(dist, DeviceMesh::over_world());
    Optimizer plain_optimizer(plain->parameters(), options), optimizer(dist->parameters(), options);
    train(plain, plain_optimizer, 5);
    train(dist, optimizer, 5);
    const auto expected = plain->named_parameters();
    for (const auto& parameter : dist->named_parameters()) {
      ASSERT_TRUE(is_dist(parameter.value())) << parameter.key();
      EXPECT_TRUE(torch::allclose(full_tensor(parameter.value()).detach(),
                                  expected[parameter.key()], 1e-5, 1e-6))
          << parameter.key();
    }
  });
}

TEST(DistModules, TrainAsOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    expect_trains_as_one_process<torch::optim::AdamW>(ranks, torch::optim::AdamWOptions(0.01));
    expect_trains_as_one_process<torch::optim::SGD>(ranks,
                                                    torch::optim::SGDOptions(0.01).momentum(0.9));
  }
}

TEST(DistModules, MembersSeeTheShardedTensor) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    nn::Linear linear = on_test_device(nn::Linear(4, 6));
    distribute_(linear->weight, mesh, {Shard{0}});
    EXPECT_TRUE(linear->named_parameters()["weight"].is_same(linear->weight));
    EXPECT_EQ(placements_of(linear->weight), Placements{Shard{0}});
    EXPECT_EQ(to_local(linear->weight).sizes(), (std::vector<int64_t>{3, 4}));
    EXPECT_TRUE(linear->weight.requires_grad());
  });
}

TEST(DistModules, ColumnsThenRowsNeedOneAllReduceEachWay) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto mesh = DeviceMesh::over_world();
    NormMlp mlp = make_norm_mlp();
    shard_columns_then_rows(mlp, mesh);
    at::Tensor x = distribute(numbers({4, 6}, 1).requires_grad_(true), mesh, {});
    at::Tensor y;
    const auto forward = count(world, [&] {
      y = mlp->down(torch::gelu(mlp->up(x)));
      y = redistribute(y, {Replicate{}});
    });
    EXPECT_EQ(forward.calls(), 1);
    EXPECT_EQ(forward.all_reduce.calls, 1);
    const auto backward = count(world, [&] { y.sum().backward(); });
    EXPECT_EQ(backward.calls(), 1);
    EXPECT_EQ(backward.all_reduce.calls, 1);
  });
}

TEST(DistModules, ClippingSendsTheNormAlone) {
  run_world(3, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto mesh = DeviceMesh::over_world();
    for (const double order : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
      SCOPED_TRACE(order);
      NormMlp plain = make_norm_mlp(), dist = make_norm_mlp();
      shard_columns_then_rows(dist, mesh);
      for (NormMlp& mlp : {std::ref(plain), std::ref(dist)})
        mlp->forward(numbers({4, 6}, 1)).square().sum().backward();
      const double expected =
          nn::utils::clip_grad_norm_(plain->parameters(), /*max_norm=*/0.5, order);
      double norm = 0;
      const auto sent =
          count(world, [&] { norm = nn::utils::clip_grad_norm_(dist->parameters(), 0.5, order); });
      EXPECT_NEAR(norm, expected, 1e-4 * expected);
      if (order == 2) {
        EXPECT_LE(sent.calls(), 2);
      }
      EXPECT_LE(sent.bytes_sent(), 128);  // the largest gradient has 240
      const auto parameters = plain->named_parameters();
      for (const auto& parameter : dist->named_parameters())
        EXPECT_TRUE(torch::allclose(full_tensor(parameter.value().grad()),
                                    parameters[parameter.key()].grad(), 1e-4, 1e-6))
            << parameter.key();
    }
  });
}

TEST(DistModules, TensorsOfDifferentMeshesAreRefused) {
  run_world(2, [](World&) {
    const at::Tensor a = distribute(numbers({4, 2}, 1), DeviceMesh({2}, {0, 1}), {Shard{0}});
    const at::Tensor b = distribute(numbers({4, 2}, 1), DeviceMesh({2}, {1, 0}), {Shard{0}});
    try {
      a + b;
      FAIL() << "no error";
    } catch (const c10::ValueError& error) {
      expect_contains(error.what(), {"must lie on one mesh"});
    }
  });
}

TEST(DistModules, OrdinaryTensorsThatRequireGradientsAreRefused) {
  run_world(2, [](World&) {
    const at::Tensor a = distribute(numbers({4, 2}, 1), DeviceMesh::over_world(), {Shard{0}});
    EXPECT_NO_THROW(a + numbers({4, 2}, 2));
    EXPECT_THROW(a + numbers({4, 2}, 2).requires_grad_(true), c10::ValueError);
  });
}

}  // namespace tessera::testing::dist_modules_test
