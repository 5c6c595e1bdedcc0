// Operators of the family "reduction" on DistTensors, forward and backward, against ordinary
// tensors.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/operator_parity.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::testing::reduction_operators_test {

std::vector<OperatorCase> cases() {
  return {
      {"sum", {{5, 4}}, [](const Tensors& x) { return x[0].sum(); }},
      {"sum by dims",
       {{2, 5, 3}},
       [](const Tensors& x) {
         return x[0].sum(at::IntArrayRef{0, 2});
       }},
      {"sum keeps dims", {{5, 4}}, [](const Tensors& x) { return x[0].sum(1, true); }},
      {"mean", {{5, 4}}, [](const Tensors& x) { return x[0].mean(); }},
      {"mean by dim", {{6, 4}}, [](const Tensors& x) { return x[0].mean(0); }},
      {"amax", {{6, 5}}, [](const Tensors& x) { return x[0].amax(0); }},
      {"max by dim", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].max(1)); }},
      {"min", {{6, 4}}, [](const Tensors& x) { return x[0].min(); }},
      {"prod", {{5}}, [](const Tensors& x) { return x[0].prod(); }, false},
      {"argmax", {{5, 4}}, [](const Tensors& x) { return x[0].argmax(1); }, false},
      {"any", {{5, 4}}, [](const Tensors& x) { return (x[0] > 0.9).any(1); }, false},
      {"all", {{5, 4}}, [](const Tensors& x) { return (x[0] > -0.5).all(); }, false},
      {"any of no dims",
       {{5, 4}},
       [](const Tensors& x) { return (x[0] > 0.9).any(std::vector<int64_t>()); },
       false},
      {"all of no dims",
       {{5, 4}},
       [](const Tensors& x) { return (x[0] > -0.5).all(std::vector<int64_t>()); },
       false},
      {"sum of no dims, which is all",
       {{5, 4}},
       [](const Tensors& x) { return x[0].sum(std::vector<int64_t>()); }},
      {"norm", {{5, 4}}, [](const Tensors& x) { return x[0].norm(); }},
      {"softmax", {{5, 4}}, [](const Tensors& x) { return torch::softmax(x[0], 1); }},
      {"log_softmax", {{2, 5, 3}}, [](const Tensors& x) { return torch::log_softmax(x[0], 1); }},
      {"sort", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].sort(1)); }},
      {"topk", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].topk(2, 0)); }},
      {"cumsum", {{5, 4}}, [](const Tensors& x) { return x[0].cumsum(0); }},
      {"mean keeps dims, in doubles",
       {{5, 4}},
       [](const Tensors& x) { return x[0].mean({0}, true, at::kDouble); }},
      {"sum of a long tensor of flags",
       {{5, 4}},
       [](const Tensors& x) { return (x[0] > 0).sum(); },
       false},
      {"sum rounded to whole numbers",
       {{5, 4}},
       [](const Tensors& x) { return x[0].sum(0, false, at::kLong); },
       false},
      {"max by dim, where",
       {{5, 4}},
       [](const Tensors& x) { return std::get<1>(x[0].max(1)); },
       false},
      {"max of all", {{5, 4}}, [](const Tensors& x) { return x[0].abs().max(); }},
      {"amin over no row for some",
       {{4, 1}},
       [](const Tensors& x) {
         return x[0].amin({0, 1});
       }},
      {"argmin of all", {{5, 4}}, [](const Tensors& x) { return x[0].argmin(); }, false},
      {"sort, where", {{5, 4}}, [](const Tensors& x) { return std::get<1>(x[0].sort(0)); }, false},
      {"argsort", {{5, 4}}, [](const Tensors& x) { return x[0].argsort(1, true); }, false},
      {"topk, where",
       {{5, 4}},
       [](const Tensors& x) { return std::get<1>(x[0].topk(2, 1)); },
       false},
      {"cumprod", {{5, 4}}, [](const Tensors& x) { return x[0].cumprod(1); }},
      {"cummax", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].cummax(1)); }},
      {"logsumexp", {{5, 4}}, [](const Tensors& x) { return x[0].logsumexp(1); }},
      {"glu", {{5, 4}}, [](const Tensors& x) { return torch::glu(x[0], 1); }},
      {"var", {{5, 4}}, [](const Tensors& x) { return x[0].var(); }},
      {"var by dim", {{5, 4}}, [](const Tensors& x) { return x[0].var(0, false, true); }},
      {"std by dims",
       {{2, 5, 3}},
       [](const Tensors& x) {
         return x[0].std(at::IntArrayRef{0, 1});
       }},
      {"var_mean",
       {{5, 4}},
       [](const Tensors& x) {
         const auto [variance, mean] = torch::var_mean(x[0], 0);
         return variance * 2 + mean;
       }},
      {"std_mean",
       {{5, 4}},
       [](const Tensors& x) {
         const auto [deviation, mean] = torch::std_mean(x[0], 1);
         return deviation * 2 + mean;
       }},
      {"norm by dim", {{5, 4}}, [](const Tensors& x) { return x[0].norm(2, 0); }},
      {"norm, the sum", {{5, 4}}, [](const Tensors& x) { return x[0].norm(1); }},
      {"norm, the largest",
       {{5, 4}},
       [](const Tensors& x) {
         return torch::linalg_vector_norm(x[0], INFINITY, at::IntArrayRef({0}));
       }},
      {"norm, the smallest",
       {{5, 4}},
       [](const Tensors& x) { return torch::linalg_vector_norm(x[0], -INFINITY); }},
      {"norm, the count",
       {{5, 4}},
       [](const Tensors& x) { return torch::linalg_vector_norm(torch::relu(x[0]), 0); },
       false},
      {"norm of order 3, in doubles",
       {{5, 4}},
       [](const Tensors& x) {
         return torch::linalg_vector_norm(x[0], 3, at::IntArrayRef({1}), true, at::kDouble);
       }},
      {"norm of norms",
       {{5, 4}, {3}},
       [](const Tensors& x) {
         return torch::stack({x[0].norm(), x[1].norm(), x[1].norm() - 9}).norm();
       }},
      {"nansum, count_nonzero",
       {{4, 5}},
       [](const Tensors& x) {
         return torch::nansum(x[0], {1}) + torch::count_nonzero(x[0], std::vector<int64_t>{1});
       }},
      {"aminmax",
       {{4, 5}},
       [](const Tensors& x) {
         const auto [least, most] = torch::aminmax(x[0], 0);
         return most * 2 - least;
       }},
      {"aminmax of all",
       {{4, 5}},
       [](const Tensors& x) {
         const auto [least, most] = torch::aminmax(x[0]);
         return most * 2 - least;
       }},
      {"median, mode, kthvalue",
       {{4, 5}},
       [](const Tensors& x) {
         return std::get<0>(x[0].median(1)) + std::get<0>(x[0].nanmedian(1)) +
                std::get<0>(x[0].kthvalue(2, 1)) + std::get<0>((x[0] * 1).mode(1));
       }},
      {"median of all",
       {{4, 5}},
       [](const Tensors& x) { return x[0].median() + x[0].nanmedian(); }},
      {"histc", {{4, 5}}, [](const Tensors& x) { return torch::histc(x[0], 4, -1, 1); }, false},
      {"softmax of no elements", {{0, 4}}, [](const Tensors& x) { return x[0].softmax(0); }},
      {"softmax along either dim",
       {{4, 6}},
       [](const Tensors& x) {
         return x[0].softmax(0) * 2 + x[0].softmax(1) + x[0].log_softmax(0) * x[0].log_softmax(1);
       }},
      {"softmax without elements",
       {{4, 0}},
       [](const Tensors& x) { return x[0].softmax(1) + x[0].log_softmax(1); }},
  };
}

TEST(Reductions, OfCutDimsSendOneNumberForEachRow) {
  const auto softmax = [](const Tensors& x) { return x[0].softmax(1) * 2; };
  const auto log_softmax = [](const Tensors& x) { return x[0].log_softmax(1) * 2; };
  // Forward: maxima and sums of four rows; backward: sums.
  expect_quiet({
      {{"softmax", {{4, 6}}, softmax}, {Shard{1}}, 2, 1, 3 * 16},
      {{"log_softmax", {{4, 6}}, log_softmax}, {Shard{1}}, 2, 1, 3 * 16},
      {{"nansum", {{4, 6}}, [](const Tensors& x) { return torch::nansum(x[0], {1}); }},
       {Shard{1}},
       1,
       0,
       16},
      {{"count_nonzero",
        {{4, 6}},
        [](const Tensors& x) { return torch::count_nonzero(x[0]); },
        false},
       {Shard{1}},
       1,
       0,
       8},
      {{"histc", {{4, 6}}, [](const Tensors& x) { return torch::histc(x[0], 4, -1, 1); }, false},
       {Shard{1}},
       1,
       0,
       16},
  });
}

TEST(ReductionOperators, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(ReductionOperators, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(ReductionOperators, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(ReductionOperatorsNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

TEST(ReductionOperators, LeaveNoGradientWhereLibTorchLeavesNone) {
  run_world(2, [](World&) {
    for (const Placement& where : {Placement(Replicate{}), Placement(Shard{0})}) {
      const at::Tensor x = distribute(on_test_device(torch::arange(5.)).requires_grad_(true),
                                      DeviceMesh::over_world(), {where});
      const at::Tensor count = torch::linalg_vector_norm(x, 0);
      EXPECT_EQ(full_tensor(count.detach()).item<float>(), 4);
      count.backward();
      EXPECT_FALSE(x.grad().defined());
    }
  });
}

TEST(ReductionOperators, OfACutDimSendWhatIsLeft) {
  const std::vector<std::vector<int64_t>> sizes = {{63, 4}};  // of 504 bytes a part
  const auto quiet = [&](const std::string& name, auto run, int64_t forward, int64_t backward) {
    return QuietCase{{name, sizes, run}, {Shard{0}}, forward, backward, 100};
  };
  expect_quiet({
      quiet(
          "sum", [](const Tensors& x) { return x[0].sum(); }, 1, 0),
      quiet(
          "mean", [](const Tensors& x) { return x[0].mean(); }, 1, 0),
      quiet(
          "var", [](const Tensors& x) { return x[0].var(); }, 2, 1),
      quiet(
          "std by dim", [](const Tensors& x) { return x[0].std(0); }, 2, 3),
      quiet(
          "norm", [](const Tensors& x) { return x[0].norm(); }, 1, 2),
      quiet(
          "norm, the sum", [](const Tensors& x) { return x[0].norm(1); }, 1, 0),
      quiet(
          "norm of order 3", [](const Tensors& x) { return x[0].norm(3, 0); }, 1, 2),
      {{"norm, the largest", sizes, [](const Tensors& x) { return x[0].norm(INFINITY); }, false},
       {Shard{0}},
       1,
       0,
       16},
      {{"amax of uneven parts", sizes, [](const Tensors& x) { return x[0].amax(0); }, false},
       {Shard{0}},
       1,
       0,
       32},
  });
}

TEST(Reductions, OfSegments) {
  const at::Tensor lengths = torch::tensor({2, 1, 3});
  for (const char* const reduce : {"sum", "mean", "max", "prod"})
    EXPECT_RULE(torch::segment_reduce(x[0], reduce, lengths.to(x[0].device())), {{6, 2}}, {{6}});
}

TEST(Reductions, OfNoElements) {
  EXPECT_RULE(x[0].softmax(1), {{3, 0}}, {{0, 3}}, {{2, 0, 3}});
  EXPECT_RULE(x[0].log_softmax(0), {{0, 3}}, {{1, 0}});
}

}  // namespace tessera::testing::reduction_operators_test
