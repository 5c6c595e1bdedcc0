#pragma once

// Small models and values for the tests of `shard_layer` and its family.
#include <gtest/gtest.h>
#include <tessera/dialects/paddle_shard_layer.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "support/models.h"

namespace tessera::testing {

namespace nn = torch::nn;
using paddle::ProcessMesh;

inline at::Tensor values(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

/// Two Linear layers and a buffer, with the same values on all ranks.
struct TwoLayersImpl : nn::Module {
  explicit TwoLayersImpl(int64_t width = 8, int64_t hidden = 10)
      : fc1(register_module("fc1", nn::Linear(width, hidden))),
        fc2(register_module("fc2", nn::Linear(hidden, width))),
        scale(register_buffer("scale", torch::full({width}, 2.0))) {
    torch::NoGradGuard no_grad;
    uint64_t seed = 3;
    for (at::Tensor& parameter : parameters())
      parameter.copy_(values(parameter.sizes().vec(), ++seed));
    to(test_device());
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::relu(fc1(x))) * scale; }
  nn::Linear fc1, fc2;
  at::Tensor scale;
};
TORCH_MODULE(TwoLayers);

/// Shards the first layer by columns and the second by rows. (LibTorch's weights are [out, in],
/// Paddle's [in, out].)
inline void columns_then_rows(const std::string& name, nn::Module& layer, const DeviceMesh& mesh) {
  auto* linear = layer.as<nn::LinearImpl>();
  if (name == "fc1") {
    linear->weight = paddle::shard_tensor(linear->weight, mesh, {Shard{0}});
    linear->bias = paddle::shard_tensor(linear->bias, mesh, {Shard{0}});
  } else if (name == "fc2") {
    linear->weight = paddle::shard_tensor(linear->weight, mesh, {Shard{1}});
  }
}

inline void expect_values(const at::Tensor& dist, const at::Tensor& plain, double tolerance = 0) {
  ASSERT_TRUE(is_dist(dist));
  ASSERT_EQ(dist.sizes(), plain.sizes());
  const at::Tensor full = full_tensor(dist).detach();
  EXPECT_TRUE(tolerance > 0 ? close_values(full, plain, tolerance) : same_values(full, plain))
      << full.cpu() << "\n"
      << plain.detach().cpu();
}

}  // namespace tessera::testing
