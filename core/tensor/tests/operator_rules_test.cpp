// Rules that users register for operators of their own.

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/tensor/dist_debug.h>
#include <tessera/tensor/dist_tensor.h>
#include <tessera/tensor/operator_rules.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/operator_parity.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::operator_rules_test {

at::Tensor scaled_tanh(const at::Tensor& x, double scale) { return (x * scale).tanh(); }
at::Tensor composed(const at::Tensor& x) { return x * 2 + 1; }

TORCH_LIBRARY(tessera_test, library) {
  library.def("scaled_tanh(Tensor x, float scale) -> Tensor");
  library.def("right_tanh(Tensor x, float scale) -> Tensor");
  library.def("wrong_tanh(Tensor x, float scale) -> Tensor");
  library.def("composed(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera_test, CompositeExplicitAutograd, library) {
  library.impl("scaled_tanh", scaled_tanh);
  library.impl("right_tanh", scaled_tanh);
  library.impl("wrong_tanh", scaled_tanh);
}
TORCH_LIBRARY_IMPL(tessera_test, CompositeImplicitAutograd, library) {
  library.impl("composed", composed);
}

at::Tensor call(const char* name, const at::Tensor& x, std::optional<double> scale = {}) {
  torch::jit::Stack stack{x};
  if (scale) stack.emplace_back(*scale);
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack[0].toTensor();
}

Strategies by_element(const OpCall& call) {
  Strategies ways;
  for (int64_t d = 0; d < call.inputs[0].ndim(); ++d) ways.push_back({{Shard{d}}, {Shard{d}}});
  return ways;
}
std::vector<TensorInfo> like_x(const OpCall& call) { return {call.inputs[0]}; }

TEST(OperatorRules, OfAUserKeepPartsWhereTheyAre) {
  register_rule("tessera_test::scaled_tanh", by_element, {.sizes = like_x, .splits = true});
  run_world(2, [](World&) {
    const at::Tensor plain =
        testing::on_test_device(torch::randn({5, 4}, at::make_generator<at::CPUGeneratorImpl>(1)));
    const at::Tensor x = distribute(plain, DeviceMesh::over_world(), {Shard{0}});
    const CommDebug debug;
    const StrictOperators strict;
    const torch::NoGradGuard no_grad;
    const at::Tensor y = call("tessera_test::scaled_tanh", x, 0.5);
    EXPECT_EQ(placements_of(y), Placements{Shard{0}});
    EXPECT_EQ(debug.calls(), 0);
    EXPECT_TRUE(torch::equal(full_tensor(y), scaled_tanh(plain, 0.5)));
    const at::Tensor z = call("tessera_test::composed", x);
    EXPECT_TRUE(torch::equal(full_tensor(z), composed(plain)));
  });
}

// The tangent of terms is not a term: a rule that says so is wrong, and EXPECT_RULE must find it.
Strategies by_terms(const OpCall&) { return {{{Partial{}}, {Partial{}}}}; }

TEST(OperatorRules, AreTestedInOneLine) {
  const torch::NoGradGuard no_grad;
  register_rule("tessera_test::right_tanh", by_element, {.sizes = like_x});
  EXPECT_RULE(call("tessera_test::right_tanh", x[0], 0.5), {{5, 4}}, {{}}, {{1, 0}});
  register_rule("tessera_test::wrong_tanh", by_terms, {.sizes = like_x});
  ::testing::TestPartResultArray failures;
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &failures);
    EXPECT_RULE(call("tessera_test::wrong_tanh", x[0], 0.5), {{5, 4}});
  }
  EXPECT_GT(failures.size(), 0);
}

TEST(OperatorRules, ThatCanHaveNoEffectAreRefused) {
  const auto refusal_of = [](const char* name) {
    return testing::error_of([&] { register_rule(name, by_element); });
  };
  testing::expect_contains(refusal_of("tessera_test::unknown"), {"must be that of an operator"});
  testing::expect_contains(refusal_of("tessera_test::composed"), {"needs no rule"});
  testing::expect_contains(refusal_of("aten::relu"), {"has a rule already"});
}

}  // namespace tessera::operator_rules_test
