// Kernels of LibTorch that read memory of their inputs as contiguous.

#include "tensor/kernel_layouts.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "tensor/op_plan.h"

namespace tessera::kernel_layouts_test {

TEST(KernelLayouts, OfKernelsThatReadMemoryAreNotThoseOfElementwiseRules) {
  for (const auto& [op, argument] : contiguous_inputs()) {
    const auto found = c10::Dispatcher::singleton().findSchema({std::string(op), ""});
    ASSERT_TRUE(found) << op;
    EXPECT_TRUE(found->schema().argumentIndexWithName(std::string(argument))) << op << argument;
    EXPECT_FALSE(ignores_reals(found->schema())) << op;  // of which parts may lie in any way
  }
}

// The arguments of the backward of a layer norm of 4 rows, of which `mean` may be strided.
std::vector<c10::IValue> arguments_with(const at::Tensor& mean) {
  const at::Tensor x = torch::ones({4, 3});
  return {x, x, std::vector<int64_t>{3}, mean, torch::ones({4, 1}), c10::IValue(), c10::IValue()};
}

TEST(KernelLayouts, FindAnInputThatIsStrided) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_layer_norm_backward", "");
  const at::Tensor strided = torch::ones({4, 2}).slice(1, 0, 1);
  const auto found = [&](const at::Tensor& mean) {
    const auto arguments = arguments_with(mean);
    return std::string(find_strided_input(
        op.schema(), at::ArrayRef<const c10::IValue>(arguments.data(), arguments.size())));
  };
  EXPECT_EQ(found(strided), "mean");
  EXPECT_EQ(found(strided.contiguous()), "");
}

TEST(KernelLayoutsDeathTest, EndsAProcessWhoseKernelWouldReadOtherMemory) {
  const at::Tensor x = torch::ones({4, 3}), one = torch::ones({4, 1});
  const at::Tensor strided = torch::ones({4, 2}).slice(1, 0, 1);
  const auto run = [&](const at::Tensor& mean) {
    setenv("TESSERA_CHECK_LAYOUTS", "1", 1);
    check_kernel_layouts();
    const at::AutoDispatchBelowADInplaceOrView below;
    at::native_layer_norm_backward(x, x, {3}, mean, one, {}, {}, {true, false, false});
  };
  EXPECT_DEATH(run(strided), "native_layer_norm_backward reads `mean` as contiguous");
  EXPECT_EXIT((run(one), std::exit(0)), ::testing::ExitedWithCode(0), "");
}

}  // namespace tessera::kernel_layouts_test
