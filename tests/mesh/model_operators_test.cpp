// Operators of the family "model" on DistTensors, forward and backward, against ordinary tensors.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/operator_parity.h"

namespace tessera::testing {
namespace {

std::vector<OperatorCase> cases() {
  return {
      {"layer_norm",
       {{2, 5, 4}, {4}, {4}},
       [](const Tensors& x) { return torch::layer_norm(x[0], {4}, x[1], x[2]); }},
      {"layer_norm without weight",
       {{5, 4}},
       [](const Tensors& x) { return torch::layer_norm(x[0], {4}); }},
      {"embedding",
       {{5, 4}, {2, 3}},
       [](const Tensors& x) { return torch::embedding(x[0], whole_numbers(x[1], 5)); }},
      {"mse_loss",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::mse_loss(x[0], x[1].detach()); }},
      {"cross_entropy",
       {{5, 4}, {5}},
       [](const Tensors& x) { return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 4)); }},
      {"attention",
       {{2, 4, 5, 3}, {2, 4, 5, 3}, {2, 4, 5, 3}},
       [](const Tensors& x) {
         return torch::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true);
       }},
      {"embedding with gradients by frequency",
       {{5, 4}, {6}},
       [](const Tensors& x) {
         return torch::embedding(x[0], whole_numbers(x[1], 3), -1, /*scale_grad_by_freq=*/true);
       }},
  };
}

TEST(ModelOperators, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(ModelOperators, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(ModelOperators, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(ModelOperatorsSlow, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

}  // namespace
}  // namespace tessera::testing
