// Normalizations on DistTensors, forward and backward, against ordinary tensors.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/operator_parity.h"
#include "support/run_world.h"

namespace tessera::testing::normalization_operators_test {

std::vector<OperatorCase> cases() {
  return {
      {"layer_norm",
       {{2, 5, 4}, {4}, {4}},
       [](const Tensors& x) { return torch::layer_norm(x[0], {4}, x[1], x[2]); }},
      {"group_norm",
       {{3, 4, 5}, {4}, {4}},
       [](const Tensors& x) { return torch::group_norm(x[0], 2, x[1], x[2]); }},
      {"group_norm with many groups, without weights",
       {{1, 12, 2, 2}},
       [](const Tensors& x) { return torch::group_norm(x[0], 12); }},
      {"batch_norm in training",
       {{3, 4, 5}, {4}, {4}},
       [](const Tensors& x) {
         return torch::batch_norm(x[0] + 3, x[1], x[2], {}, {}, true, 0.1, 1e-5, false);
       }},
      {"batch_norm of rows in training",
       {{5, 3}},
       [](const Tensors& x) {
         return torch::batch_norm(x[0], {}, {}, {}, {}, true, 0.1, 1e-5, false);
       }},
      {"batch_norm in training, with its running statistics",
       {{3, 4, 2, 3}, {4}, {4}},
       [](const Tensors& x) {
         const at::Tensor mean = torch::ones_like(x[1].detach()), variance = mean * 3;
         const at::Tensor y =
             torch::batch_norm(x[0], x[1], x[2], mean, variance, true, 0.2, 1e-5, false);
         return y + (mean * 2 + variance).view({1, -1, 1, 1});
       }},
      {"batch_norm by given statistics",
       {{3, 4, 5}, {4}, {4}},
       [](const Tensors& x) {
         const at::Tensor mean = x[1].detach() + 1, variance = x[2].detach().abs() + 1;
         return torch::batch_norm(x[0], x[1], x[2], mean, variance, false, 0.1, 1e-5, false);
       }},
      {"instance_norm",
       {{2, 3, 5}},
       [](const Tensors& x) {
         return torch::instance_norm(x[0], {}, {}, {}, {}, true, 0.1, 1e-5, false);
       }},
  };
}

TEST(Normalizations, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(Normalizations, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(Normalizations, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(NormalizationsNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

TEST(Normalizations, OfACutBatchSendTwoSumsForEachChannel) {
  const auto batch_norm = [](const Tensors& x) {
    return torch::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false);
  };
  const auto group_norm = [](const Tensors& x) { return torch::group_norm(x[0], 2, x[1], x[2]); };
  const auto by_given = [](const Tensors& x) {
    const at::Tensor ones = on_test_device(torch::ones({4}));
    return torch::batch_norm(x[0], x[1], x[2], ones, ones * 2, false, 0.1, 1e-5, false);
  };
  const Placements rows = {Shard{0}, Replicate{}, Replicate{}};
  const Placements channels = {Shard{1}, Shard{0}, Shard{0}};
  const std::vector<std::vector<int64_t>> sizes = {{5, 4, 7}, {4}, {4}};
  expect_quiet({
      {{"batch_norm, rows", sizes, batch_norm}, rows, 1, 1, 256},
      {{"batch_norm, channels", sizes, batch_norm}, channels, 0, 0, 0},
      {{"batch_norm by given statistics, rows", sizes, by_given}, rows, 0, 2, 64},
      {{"batch_norm by given statistics, channels", sizes, by_given}, channels, 0, 0, 0},
      {{"group_norm, rows", sizes, group_norm}, rows, 0, 2, 64},
      {{"group_norm, channels", sizes, group_norm}, channels, 0, 0, 0},
  });
}

// LibTorch hands the kernel one zero for all elements, where it reads a whole tensor.
TEST(Normalizations, AGroupNormWhoseResultHasNoGradientAddsNone) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = distribute(on_test_device(torch::rand({2, 4, 3})), mesh, {Shard{0}});
    const at::Tensor scale =
        distribute(on_test_device(torch::ones({4})), mesh, {}).requires_grad_();
    const at::Tensor result = torch::group_norm(x, 2, scale, scale).sgn();
    for (int64_t size = 1; size < 50; ++size) on_test_device(torch::full({size}, 1e30));
    result.sum().backward();
    EXPECT_EQ(full_tensor(scale.grad()).count_nonzero().item<int64_t>(), 0);
  });
}

// The module's buffers are ordinary tensors, or DistTensors.
void expect_trains_alike(bool distributes_buffers) {
  run_world(3, [=](World&) {
    const auto mesh = DeviceMesh::over_world();
    torch::nn::BatchNorm2d plain = on_test_device(torch::nn::BatchNorm2d(4)),
                           dist = on_test_device(torch::nn::BatchNorm2d(4));
    for (at::Tensor& parameter : dist->parameters()) distribute_(parameter, mesh, {});
    if (distributes_buffers) {
      distribute_(dist->running_mean, mesh, {Shard{0}});
      distribute_(dist->running_var, mesh, {});
    }
    const auto value = [](const at::Tensor& tensor) {
      return is_dist(tensor) ? full_tensor(tensor) : tensor;
    };
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = on_test_device(torch::randn({5, 4, 3, 2}, generator)) * 2 + 10;
      plain->forward(x).square().sum().backward();
      dist->forward(distribute(x, mesh, {Shard{0}})).square().sum().backward();
    }
    EXPECT_TRUE(torch::allclose(value(dist->running_mean), plain->running_mean));
    EXPECT_TRUE(torch::allclose(value(dist->running_var), plain->running_var));
    EXPECT_TRUE(torch::allclose(value(dist->weight.grad()), plain->weight.grad(), 1e-4, 1e-4));
    plain->eval();
    dist->eval();
    const at::Tensor x = on_test_device(torch::ones({2, 4, 3, 2}));
    EXPECT_TRUE(torch::allclose(value(dist->forward(distribute(x, mesh, {Shard{0}}))),
                                plain->forward(x), 1e-4, 1e-5));
  });
}

TEST(Normalizations, RunningStatisticsAreThoseOfOneProcess) {
  expect_trains_alike(/*distributes_buffers=*/false);
  expect_trains_alike(/*distributes_buffers=*/true);
}

TEST(Normalizations, OfShortDtypesAreAsExactAsOneProcess) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = on_test_device((torch::arange(60.) / 7).view({5, 4, 3}).to(at::kBFloat16));
    const auto normalized = [](const at::Tensor& input) {
      return torch::batch_norm(input, {}, {}, {}, {}, true, 0.1, 1e-5, false);
    };
    const at::Tensor y = full_tensor(normalized(distribute(x, mesh, {Shard{0}})));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(torch::allclose(y.to(at::kFloat), normalized(x.to(at::kFloat)), 1e-2, 1e-2));
  });
}

// On the CPU there are none, and a rank outside of the mesh knows that.
TEST(Normalizations, InEvaluationReturnStatisticsOfTheSizesOfOneProcess) {
  run_world(3, [](World&) {
    const at::Tensor x = on_test_device((torch::arange(60.) / 7).view({5, 4, 3}));
    const at::Tensor ones = on_test_device(torch::ones({4}));
    const auto run = [&](const at::Tensor& input) {
      return std::get<1>(torch::native_batch_norm(input, ones, ones, ones, ones, false, 0.1, 1e-5));
    };
    const DeviceMesh mesh({2}, {0, 1});
    for (const Placement& placement : {Placement(Shard{0}), Placement(Shard{1})})
      EXPECT_EQ(run(distribute(x, mesh, {placement})).sizes(), run(x).sizes());
    // One that is written to and can't be placed anew: all ranks compute on whole tensors.
    at::Tensor cut = distribute(ones, mesh, {Shard{0}}), other = cut.clone();
    const auto with_cut = torch::_native_batch_norm_legit(distribute(x, mesh, {Shard{0}}), ones,
                                                          ones, cut, other, false, 0.1, 1e-5);
    EXPECT_EQ(std::get<1>(with_cut).sizes(), run(x).sizes());
  });
}

TEST(Normalizations, OfRowsHaveStatisticsOfOneDtypeInAndOutsideOfAMesh) {
  run_world(3, [](World&) {
    const at::Tensor x = on_test_device(torch::ones({5, 4}).to(at::kBFloat16));
    const auto mean_of = [](const at::Tensor& input) {
      return std::get<1>(torch::native_layer_norm(input, {4}, {}, {}, 1e-5));
    };
    const at::Tensor dist = distribute(x, DeviceMesh({2}, {2, 0}), {Shard{0}});
    EXPECT_EQ(mean_of(dist).scalar_type(), mean_of(x).scalar_type());
  });
}

TEST(Normalizations, StatisticsHaveTheDtypesOfOneProcess) {
  run_world(2, [](World&) {
    const at::Tensor x = on_test_device((torch::arange(60.) / 7).view({5, 4, 3}).to(at::kBFloat16));
    const at::Tensor dist = distribute(x, DeviceMesh::over_world(), {Shard{0}});
    for (const auto dtype : {at::kBFloat16, at::kFloat, at::ScalarType::Undefined}) {
      std::optional<at::Tensor> weight;
      if (dtype != at::ScalarType::Undefined) weight = on_test_device(torch::ones({4}, dtype));
      const auto run = [&](const at::Tensor& input) {
        return torch::native_batch_norm(input, weight, weight, {}, {}, true, 0.1, 1e-5);
      };
      const auto [y, mean, deviation] = run(x);
      const auto [dist_y, dist_mean, dist_deviation] = run(dist);
      EXPECT_EQ(dist_mean.scalar_type(), mean.scalar_type()) << dtype;
      EXPECT_EQ(dist_deviation.scalar_type(), deviation.scalar_type()) << dtype;
      EXPECT_TRUE(torch::allclose(full_tensor(dist_mean), mean, 1e-2, 1e-2)) << dtype;
    }
  });
}

}  // namespace tessera::testing::normalization_operators_test
