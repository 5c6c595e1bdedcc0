// Operators on images and other grids: resized, padded, sampled, reordered.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/operator_parity.h"

namespace tessera::testing::spatial_operators_test {

// Cases that send nothing if each input is placed so.
std::vector<QuietCase> quiet_cases() {
  const Placements rows = {Shard{0}}, channels = {Shard{1}}, both_rows = {Shard{0}, Shard{0}};
  const auto of_images = [](const std::string& name, auto f) {
    return OperatorCase{name, {{2, 4, 5, 6}}, [f](const Tensors& x) { return f(x[0]); }};
  };
  return {
      {{"upsample lines",
        {{2, 4, 5}},
        [](const Tensors& x) {
          return torch::upsample_nearest1d(x[0], {8}) + torch::upsample_linear1d(x[0], {8}, false) +
                 torch::_upsample_nearest_exact1d(x[0], {8});
        }},
       channels},
      {of_images("upsample to the nearest pixel",
                 [](const at::Tensor& x) {
                   return torch::upsample_nearest2d(x, {7, 9}) +
                          torch::_upsample_nearest_exact2d(x, {7, 9});
                 }),
       channels},
      {of_images("upsample between pixels",
                 [](const at::Tensor& x) {
                   return torch::upsample_bilinear2d(x, {7, 9}, true) +
                          torch::upsample_bicubic2d(x, {7, 9}, false);
                 }),
       rows},
      {of_images("upsample without aliases",
                 [](const at::Tensor& x) {
                   return torch::_upsample_bilinear2d_aa(x, {3, 4}, false) +
                          torch::_upsample_bicubic2d_aa(x, {3, 4}, false);
                 }),
       channels},
      {{"upsample volumes",
        {{2, 2, 3, 4, 3}},
        [](const Tensors& x) {
          return torch::upsample_nearest3d(x[0], {4, 5, 6}) +
                 torch::_upsample_nearest_exact3d(x[0], {4, 5, 6}) +
                 torch::upsample_trilinear3d(x[0], {4, 5, 6}, false);
        }},
       rows},
      {{"interpolate",
        {{2, 4, 5, 6}},
        [](const Tensors& x) {
          return torch::nn::functional::interpolate(x[0],
                                                    torch::nn::functional::InterpolateFuncOptions()
                                                        .scale_factor(std::vector<double>{2, 2})
                                                        .mode(torch::kBilinear)
                                                        .align_corners(false));
        }},
       rows},
      {{"pads of lines",
        {{2, 4, 5}},
        [](const Tensors& x) {
          return torch::reflection_pad1d(x[0], {2, 1}) + torch::replication_pad1d(x[0], {2, 1});
        }},
       channels},
      {of_images("pads",
                 [](const at::Tensor& x) {
                   return torch::reflection_pad2d(x, {2, 1, 0, 3}) +
                          torch::replication_pad2d(x, {2, 1, 0, 3});
                 }),
       rows},
      {{"pads of volumes",
        {{2, 2, 3, 4, 3}},
        [](const Tensors& x) {
          return torch::reflection_pad3d(x[0], {1, 1, 2, 0, 1, 1}) +
                 torch::replication_pad3d(x[0], {1, 1, 2, 0, 1, 1});
        }},
       channels},
      {{"grid_sampler",
        {{2, 4, 5, 6}, {2, 3, 3, 2}},
        [](const Tensors& x) { return torch::grid_sampler_2d(x[0], x[1].tanh(), 0, 0, false); }},
       both_rows},
      {{"grid_sampler of volumes",
        {{2, 2, 3, 4, 3}, {2, 2, 3, 2, 3}},
        [](const Tensors& x) { return torch::grid_sampler_3d(x[0], x[1].tanh(), 0, 1, true); }},
       both_rows},
      {of_images("im2col",
                 [](const at::Tensor& x) {
                   return torch::im2col(x, {2, 3}, {1, 1}, {1, 0}, {2, 1});
                 }),
       channels},
      {{"col2im",
        {{2, 24, 9}},
        [](const Tensors& x) {
          return torch::col2im(x[0], {4, 5}, {2, 3}, {1, 1}, {0, 0}, {1, 1});
        }},
       channels},
      {of_images("pixel_shuffle", [](const at::Tensor& x) { return torch::pixel_shuffle(x, 2); }),
       rows},
      {of_images("pixel_unshuffle, channel_shuffle",
                 [](const at::Tensor& x) {
                   return torch::channel_shuffle(
                       torch::pixel_unshuffle(x.slice(2, 0, 4).contiguous(), 2), 2);
                 }),
       rows},
      {of_images("max_unpool2d",
                 [](const at::Tensor& x) {
                   const auto [values, places] = torch::max_pool2d_with_indices(x, {2, 2});
                   return torch::max_unpool2d(values, places, {5, 6});
                 }),
       channels},
      {{"max_unpool3d",
        {{2, 2, 4, 4, 4}},
        [](const Tensors& x) {
          const auto [values, places] = torch::max_pool3d_with_indices(x[0], {2, 2, 2});
          return torch::max_unpool3d(values, places, {4, 4, 4}, {2, 2, 2}, {0, 0, 0});
        }},
       rows},
      {{"fractional_max_pool2d",
        {{2, 4, 5, 6}, {2, 4, 2}},
        [](const Tensors& x) {
          const at::Tensor samples = x[1].detach().sigmoid();
          return std::get<0>(torch::fractional_max_pool2d(x[0], {2, 2}, {3, 3}, samples));
        }},
       {Shard{1}, Shard{1}}},
      {{"fractional_max_pool3d",
        {{2, 2, 4, 5, 4}, {2, 2, 3}},
        [](const Tensors& x) {
          const at::Tensor samples = x[1].detach().sigmoid();
          return std::get<0>(torch::fractional_max_pool3d(x[0], {2, 2, 2}, {2, 3, 2}, samples));
        }},
       both_rows},
  };
}

std::vector<OperatorCase> cases() {
  std::vector<OperatorCase> all;
  for (const QuietCase& quiet : quiet_cases()) all.push_back(quiet.test);
  return all;
}

TEST(SpatialOperators, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(SpatialOperators, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(SpatialOperatorsNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }
TEST(SpatialOperators, SendNothing) { expect_quiet(quiet_cases()); }

}  // namespace tessera::testing::spatial_operators_test
