// Convolutions and pooling on DistTensors, forward and backward, against ordinary tensors.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/operator_parity.h"
#include "support/run_world.h"

namespace tessera::testing::convolution_operators_test {

std::vector<OperatorCase> cases() {
  return {
      {"conv1d",
       {{3, 4, 5}, {2, 4, 3}, {2}},
       [](const Tensors& x) { return torch::conv1d(x[0], x[1], x[2], 1, 1); }},
      {"conv2d",
       {{2, 3, 5, 4}, {4, 3, 3, 2}, {4}},
       [](const Tensors& x) {
         return torch::conv2d(x[0], x[1], x[2], {2, 1}, {1, 0}, {1, 2});
       }},
      {"conv2d without bias",
       {{3, 2, 4, 4}, {3, 2, 1, 1}},
       [](const Tensors& x) { return torch::conv2d(x[0], x[1]); }},
      {"conv2d of groups",
       {{3, 4, 4, 3}, {4, 1, 3, 3}},
       [](const Tensors& x) { return torch::conv2d(x[0], x[1], {}, 1, 1, 1, 4); }},
      {"conv_transpose2d",
       {{2, 3, 3, 4}, {3, 4, 2, 3}, {4}},
       [](const Tensors& x) {
         return torch::conv_transpose2d(x[0], x[1], x[2], {2, 1}, {1, 0}, {1, 0});
       }},
      {"conv3d",
       {{2, 2, 3, 3, 2}, {2, 2, 2, 2, 2}},
       [](const Tensors& x) { return torch::conv3d(x[0], x[1]); }},
      {"conv2d, the gradient of the weight alone",
       {{3, 2, 4, 4}, {3, 2, 3, 3}},
       [](const Tensors& x) { return torch::conv2d(x[0].detach(), x[1]); }},
      {"max_pool1d", {{3, 4, 6}}, [](const Tensors& x) { return torch::max_pool1d(x[0], 2, 1); }},
      {"max_pool1d without gradients",
       {{3, 4, 6}},
       [](const Tensors& x) { return torch::max_pool1d(x[0], 2, 1); },
       false},
      {"max_pool2d", {{3, 4, 5, 6}}, [](const Tensors& x) { return torch::max_pool2d(x[0], 2); }},
      {"max_pool2d, where",
       {{4, 5, 6}},
       [](const Tensors& x) { return std::get<1>(torch::max_pool2d_with_indices(x[0], 3, 2, 1)); },
       false},
      {"max_pool3d",
       {{2, 3, 4, 5, 4}},
       [](const Tensors& x) { return torch::max_pool3d(x[0], 3, 2, 1, 1, /*ceil_mode=*/true); }},
      {"avg_pool1d", {{3, 4, 6}}, [](const Tensors& x) { return torch::avg_pool1d(x[0], 2); }},
      {"pooling of lines without gradients",
       {{3, 4, 6}},
       [](const Tensors& x) {
         const torch::NoGradGuard no_grad;
         return torch::avg_pool1d(x[0], 2) + torch::adaptive_avg_pool1d(x[0], 3);
       },
       false},
      {"avg_pool2d",
       {{3, 4, 5, 6}},
       [](const Tensors& x) { return torch::avg_pool2d(x[0], 3, 2, 1); }},
      {"avg_pool3d",
       {{2, 3, 4, 4, 4}},
       [](const Tensors& x) { return torch::avg_pool3d(x[0], 2); }},
      {"adaptive_avg_pool1d",
       {{3, 4, 6}},
       [](const Tensors& x) { return torch::adaptive_avg_pool1d(x[0], 4); }},
      {"adaptive_avg_pool2d",
       {{3, 4, 5, 6}},
       [](const Tensors& x) {
         return torch::adaptive_avg_pool2d(x[0], {2, 3});
       }},
      {"adaptive_avg_pool2d to one",
       {{3, 4, 5, 6}},
       [](const Tensors& x) {
         return torch::adaptive_avg_pool2d(x[0], {1, 1});
       }},
      {"adaptive_avg_pool3d",
       {{2, 3, 4, 3, 4}},
       [](const Tensors& x) {
         return torch::adaptive_avg_pool3d(x[0], {2, 2, 3});
       }},
      {"adaptive_max_pool2d",
       {{3, 4, 5, 6}},
       [](const Tensors& x) {
         return std::get<0>(torch::adaptive_max_pool2d(x[0], {2, 3}));
       }},
  };
}

TEST(Convolutions, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(Convolutions, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(Convolutions, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(ConvolutionsNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

TEST(Convolutions, SendNothingButSumsOfGradients) {
  const auto conv = [](const Tensors& x) { return torch::conv2d(x[0], x[1], x[2]); };
  const auto transposed = [](const Tensors& x) {
    return torch::conv_transpose2d(x[0], x[1], x[2]);
  };
  const std::vector<std::vector<int64_t>> sizes = {{3, 2, 6, 6}, {2, 2, 3, 3}, {2}};
  const Placements rows = {Shard{0}, Replicate{}, Replicate{}};
  const auto pooled = [](const std::string& name, const auto& pool) {
    return OperatorCase{name, {{3, 2, 6, 6}}, [=](const Tensors& x) { return pool(x[0], 2); }};
  };
  const auto max_pool = [](const at::Tensor& x, int size) { return torch::max_pool2d(x, size); };
  const auto avg_pool = [](const at::Tensor& x, int size) { return torch::avg_pool2d(x, size); };
  const auto adaptive = [](const at::Tensor& x, int size) {
    return torch::adaptive_avg_pool2d(x, {size, size});
  };
  expect_quiet({
      {{"conv2d by rows", sizes, conv}, rows, 0, 2, 512},
      {{"conv2d by channels of the output", sizes, conv},
       {Replicate{}, Shard{0}, Shard{0}},
       0,
       1,
       2048},
      {{"conv2d by channels of the input", sizes, conv},
       {Shard{1}, Shard{1}, Replicate{}},
       1,
       0,
       2048},
      {{"conv_transpose2d by rows", sizes, transposed}, rows, 0, 2, 512},
      {pooled("max_pool2d by rows", max_pool), {Shard{0}}, 0, 0, 0},
      {pooled("max_pool2d by channels", max_pool), {Shard{1}}, 0, 0, 0},
      {pooled("avg_pool2d by rows", avg_pool), {Shard{0}}, 0, 0, 0},
      {pooled("adaptive_avg_pool2d by channels", adaptive), {Shard{1}}, 0, 0, 0},
  });
}

}  // namespace tessera::testing::convolution_operators_test
