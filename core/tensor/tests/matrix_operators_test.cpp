// Operators of the family "matrix" on DistTensors, forward and backward, against ordinary tensors.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/operator_parity.h"

namespace tessera::testing::matrix_operators_test {

namespace F = torch::nn::functional;

std::vector<OperatorCase> cases() {
  return {
      {"mm", {{5, 4}, {4, 3}}, [](const Tensors& x) { return torch::mm(x[0], x[1]); }},
      {"matmul 3-D",
       {{2, 5, 4}, {4, 3}},
       [](const Tensors& x) { return torch::matmul(x[0], x[1]); }},
      {"addmm",
       {{3}, {5, 4}, {4, 3}},
       [](const Tensors& x) { return torch::addmm(x[0], x[1], x[2]); }},
      {"linear",
       {{5, 4}, {3, 4}, {3}},
       [](const Tensors& x) { return F::linear(x[0], x[1], x[2]); }},
      {"linear 3-D",
       {{2, 5, 4}, {3, 4}, {3}},
       [](const Tensors& x) { return F::linear(x[0], x[1], x[2]); }},
      {"bmm", {{2, 5, 4}, {2, 4, 3}}, [](const Tensors& x) { return torch::bmm(x[0], x[1]); }},
      {"baddbmm",
       {{2, 1, 3}, {2, 5, 4}, {2, 4, 3}},
       [](const Tensors& x) { return torch::baddbmm(x[0], x[1], x[2]); }},
      {"mv", {{5, 4}, {4}}, [](const Tensors& x) { return torch::mv(x[0], x[1]); }},
      {"addmv",
       {{5}, {5, 4}, {4}},
       [](const Tensors& x) { return torch::addmv(x[0], x[1], x[2], 2, 3); }},
      {"dot", {{5}, {5}}, [](const Tensors& x) { return torch::dot(x[0], x[1]); }},
      {"outer", {{5}, {3}}, [](const Tensors& x) { return torch::outer(x[0], x[1]); }},
      {"addr", {{5, 3}, {5}, {3}}, [](const Tensors& x) { return torch::addr(x[0], x[1], x[2]); }},
      {"einsum",
       {{2, 5, 3}, {2, 3, 4}},
       [](const Tensors& x) {
         return torch::einsum("bik,bkj->bij", {x[0], x[1]});
       }},
  };
}

TEST(MatrixOperators, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(MatrixOperators, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(MatrixOperators, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(MatrixOperatorsNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

// The rows of each rank's parts must be multiples of 16 bytes.
OperatorCase groups() {
  return {"_grouped_mm", {{4, 8, 16}, {4, 16, 24}}, [](const Tensors& x) {
            return at::_grouped_mm(x[0], x[1]);
          }};
}

TEST(GroupedProducts, OnTwoRanks) { expect_as_plain({groups()}, {2}); }
TEST(GroupedProducts, OfBatchesThatAreCutAlikeSendNothing) {
  expect_quiet({{groups(), {Shard{0}, Shard{0}}}});
}

}  // namespace tessera::testing::matrix_operators_test
