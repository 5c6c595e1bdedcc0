// Operators of the family "model" on DistTensors, forward and backward, against ordinary tensors.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/operator_parity.h"
#include "support/run_world.h"

namespace tessera::testing::model_operators_test {

std::vector<OperatorCase> cases() {
  return {
      {"layer_norm without weight",
       {{5, 4}},
       [](const Tensors& x) { return torch::layer_norm(x[0], {4}); }},
      {"embedding",
       {{5, 4}, {2, 3}},
       [](const Tensors& x) { return torch::embedding(x[0], whole_numbers(x[1], 5)); }},
      {"embedding of a vocabulary that no two ranks share",
       {{1, 4}, {3}},
       [](const Tensors& x) { return torch::embedding(x[0], whole_numbers(x[1], 1)); }},
      {"embedding with a row for padding",
       {{5, 4}, {6}},
       [](const Tensors& x) { return torch::embedding(x[0], whole_numbers(x[1], 5), 2); }},
      {"attention with a mask",
       {{2, 2, 3, 4}, {2, 1, 3, 3}},
       [](const Tensors& x) {
         return torch::scaled_dot_product_attention(x[0], x[0] * 2, x[0], x[1].detach());
       }},
      {"attention by parts",
       {{2, 2, 3, 4}, {2, 1, 3, 3}},
       [](const Tensors& x) {
         return std::get<0>(torch::_scaled_dot_product_attention_math(x[0], x[0] * 2, x[0], x[1]));
       }},
      {"attention",
       {{2, 4, 5, 3}, {2, 4, 5, 3}},
       [](const Tensors& x) {
         return torch::scaled_dot_product_attention(x[0], x[1], x[1] * x[0].detach(), {}, 0.0,
                                                    /*is_causal=*/true);
       }},
      {"attention with fewer heads of keys",
       {{2, 4, 5, 3}, {2, 2, 5, 3}},
       [](const Tensors& x) {
         return torch::scaled_dot_product_attention(x[0], x[1], x[1] * 2, {}, 0.0, true, {},
                                                    /*enable_gqa=*/true);
       }},
      {"embedding_bag",
       {{5, 4}, {7}},
       [](const Tensors& x) {
         const at::Tensor starts = on_test_device(torch::tensor({0, 3, 5}));
         const at::Tensor indices = whole_numbers(x[1], 5);
         at::Tensor sum = torch::zeros({}, x[0].options().requires_grad(false));
         for (const int64_t mode : {0, 1})
           sum = sum + std::get<0>(torch::embedding_bag(x[0], indices, starts, false, mode));
         return sum + std::get<0>(torch::embedding_bag(x[0], indices, starts, false, 2));
       }},
  };
}

TEST(ModelOperators, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(ModelOperators, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(ModelOperators, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(ModelOperatorsNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

TEST(ModelOperators, SendNoRowsOfAVocabularyThatIsCut) {
  const auto run = [](const Tensors& x) { return torch::embedding(x[0], whole_numbers(x[1], 7)); };
  expect_quiet({{{"embedding by rows of the weight", {{7, 4}, {2, 3}}, run},
                 {Shard{0}, Replicate{}},
                 1,
                 0,
                 256},
                {{"embedding by columns of the weight", {{7, 4}, {2, 3}}, run},
                 {Shard{1}, Replicate{}},
                 0,
                 0,
                 0}});
}

TEST(ModelOperators, HeadsOfKeysThatDivideStayCut) {
  const auto run = [](const Tensors& x) {
    return torch::scaled_dot_product_attention(x[0], x[1], x[1] * 2, {}, 0.0, true, {},
                                               /*enable_gqa=*/true);
  };
  expect_quiet({{{"4 heads, 2 of keys", {{2, 4, 5, 3}, {2, 2, 5, 3}}, run}, {Shard{1}, Shard{1}}}});
}

TEST(ModelOperators, RefuseIndicesOutsideOfAVocabularyThatIsCut) {
  TESSERA_ON_HOST_ONLY("on a device the host does not read the indices");
  run_world(2, [](World&) {
    const at::Tensor weight =
        distribute(on_test_device(torch::ones({5, 2})), DeviceMesh::over_world(), {Shard{0}});
    for (const int64_t index : {-1, 5})
      EXPECT_THROW(torch::embedding(weight, on_test_device(torch::tensor({0, int(index)}))),
                   c10::IndexError);
  });
}

}  // namespace tessera::testing::model_operators_test
