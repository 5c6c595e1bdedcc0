// Operators of the family "matrix" on DistTensors, forward and backward, against ordinary tensors.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/operator_parity.h"
#include "support/run_world.h"

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

// Groups end at these rows, or elements of the summed dim.
at::Tensor ends() { return on_test_device(torch::tensor({4, 5, 12}, at::kInt)); }

TEST(GroupedProducts, AreThoseOfOrdinaryTensors) {
  EXPECT_RULE(at::_grouped_mm(x[0], x[1]), {{4, 8, 16}, {4, 16, 24}}, {{3, 1, 4}, {3, 4, 8}});
  EXPECT_RULE(at::_grouped_mm(x[0], x[1], ends()), {{12, 16}, {3, 16, 8}}, {{8, 12}, {12, 16}},
              {{3, 8, 16}, {16, 12}});
  EXPECT_RULE(at::_grouped_mm(x[0], x[1].mT(), ends()), {{12, 16}, {3, 8, 16}});
  EXPECT_RULE(at::_grouped_mm(whole_numbers(x[0], 3).to(at::kBFloat16),
                              whole_numbers(x[1], 3).to(at::kBFloat16)),
              {{4, 8, 16}, {4, 16, 24}});
}

// LibTorch refuses them, too: otherwise some ranks would, by their parts.
TEST(GroupedProducts, OfFactorsThatDoNotFitAreRefusedOnAllRanks) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 1});
    const auto placed = [&](std::vector<int64_t> sizes, int64_t dim) {
      return distribute(on_test_device(torch::ones(sizes)), mesh, {Shard{dim}});
    };
    const auto error = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& offs = {}) {
      return error_of([&] { at::_grouped_mm(a, b, offs); });
    };
    expect_contains(error(placed({2, 3, 6}, 1), placed({2, 6, 4}, 2)), {"multiples of 16 bytes"});
    expect_contains(error(placed({2, 3, 8}, 1), placed({2, 12, 4}, 2)), {"the same summed dim"});
    expect_contains(error(placed({2, 3, 8}, 1), placed({3, 8, 4}, 2)), {"as many groups"});
    expect_contains(error(placed({3, 8}, 0), placed({2, 8, 4}, 2)), {"0 groups by `offs`"});
  });
}

TEST(GroupedProducts, OfBatchesThatAreCutAlikeSendNothing) {
  expect_quiet({{groups(), {Shard{0}, Shard{0}}}});
}

}  // namespace tessera::testing::matrix_operators_test
