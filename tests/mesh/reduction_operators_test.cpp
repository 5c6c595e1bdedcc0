// Operators of the family "reduction" on DistTensors, forward and backward, against ordinary
// tensors.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/operator_parity.h"

namespace tessera::testing {
namespace {

std::vector<OperatorCase> cases() {
  return {
      {"sum", {{5, 4}}, [](const Tensors& x) { return x[0].sum(); }},
      {"sum by dims",
       {{2, 5, 3}},
       [](const Tensors& x) {
         return x[0].sum({0, 2});
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
      {"norm", {{5, 4}}, [](const Tensors& x) { return x[0].norm(); }},
      {"softmax", {{5, 4}}, [](const Tensors& x) { return torch::softmax(x[0], 1); }},
      {"log_softmax", {{2, 5, 3}}, [](const Tensors& x) { return torch::log_softmax(x[0], 1); }},
      {"sort", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].sort(1)); }},
      {"topk", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].topk(2, 0)); }},
      {"cumsum", {{5, 4}}, [](const Tensors& x) { return x[0].cumsum(0); }},
  };
}

TEST(ReductionOperators, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(ReductionOperators, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(ReductionOperators, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(ReductionOperatorsSlow, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

}  // namespace
}  // namespace tessera::testing
