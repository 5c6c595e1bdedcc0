// The options of CPUAdam: defaults, param groups, and refused values.
#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::cpu_adam_options_test {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;

const CPUAdamOptions& options_of(CPUAdam& adam, size_t group) {
  return static_cast<const CPUAdamOptions&>(adam.param_groups()[group].options());
}

OptimizerParamGroup group_of(const Tensor& param, const CPUAdamOptions& options) {
  return {std::vector<Tensor>{param}, std::make_unique<CPUAdamOptions>(options)};
}

TEST(CPUAdamOptions, AreThoseOfColossalAI) {
  EXPECT_EQ(CPUAdam::num_fp32_shards_per_param, 4);
  const CPUAdamOptions defaults;
  EXPECT_EQ(defaults.lr(), 1e-3);
  EXPECT_EQ(defaults.betas(), std::make_tuple(0.9, 0.999));
  EXPECT_EQ(defaults.eps(), 1e-8);
  EXPECT_EQ(defaults.weight_decay(), 0);
  EXPECT_TRUE(defaults.bias_correction() && defaults.adamw_mode());
}

// As LibTorch does for its own AdamW, for the options that both have.
TEST(CPUAdamOptions, OfAParamGroupAreCompletedFromTheOptimizersAsAdamWs) {
  const Tensor a = torch::ones({2}), b = torch::ones({2}), c = torch::ones({2});
  CPUAdam adam({group_of(a, CPUAdamOptions(3e-2)),
                group_of(b, CPUAdamOptions().adamw_mode(false).betas({0.5, 0.6}))},
               CPUAdamOptions(0.1).eps(1e-3).weight_decay(0.2).bias_correction(false));
  adam.add_param_group({std::vector<Tensor>{c}});
  EXPECT_EQ(options_of(adam, 0).lr(), 3e-2);
  EXPECT_TRUE(options_of(adam, 0).adamw_mode());
  EXPECT_EQ(options_of(adam, 1).lr(), 0.1);
  EXPECT_FALSE(options_of(adam, 1).adamw_mode());
  EXPECT_EQ(options_of(adam, 1).betas(), std::make_tuple(0.5, 0.6));
  EXPECT_EQ(options_of(adam, 2).lr(), 0.1);
  for (const size_t group : {0, 1, 2}) {
    EXPECT_EQ(options_of(adam, group).eps(), 1e-3);
    EXPECT_EQ(options_of(adam, group).weight_decay(), 0.2);
    EXPECT_FALSE(options_of(adam, group).bias_correction());
  }
}

TEST(CPUAdamOptions, OfEachParamGroupAreUsed) {
  Tensor slow = torch::ones({3}), fast = torch::ones({3});
  CPUAdam adam({group_of(slow, CPUAdamOptions(0.1)), group_of(fast, CPUAdamOptions(0.4))});
  slow.mutable_grad() = torch::ones({3});
  fast.mutable_grad() = torch::ones({3});
  adam.step();
  EXPECT_TRUE(torch::allclose(slow, torch::full({3}, 0.9)));
  EXPECT_TRUE(torch::allclose(fast, torch::full({3}, 0.6)));
  adam.param_groups()[0].options().set_lr(0.2);
  adam.step();
  EXPECT_TRUE(torch::allclose(slow, torch::full({3}, 0.7)));
}

TEST(CPUAdamOptions, OutOfRangeAreRefused) {
  const Tensor param = torch::ones({2});
  CPUAdam good({param});
  for (const auto& wrong :
       {CPUAdamOptions(-1), CPUAdamOptions().eps(-1), CPUAdamOptions().weight_decay(-1),
        CPUAdamOptions().betas({1, 0.9}), CPUAdamOptions().betas({0.9, -0.1})}) {
    EXPECT_THROW(CPUAdam({param}, wrong), c10::ValueError);
    EXPECT_THROW(CPUAdam({group_of(param, wrong)}), c10::ValueError);
    EXPECT_THROW(good.add_param_group(group_of(torch::ones({2}), wrong)), c10::ValueError);
  }
  testing::expect_error([&] { CPUAdam({param}, CPUAdamOptions(-1)); },
                        {"[CPUAdam] lr must not be negative; got -1"});
  EXPECT_EQ(good.param_groups().size(), 1u);
}

}  // namespace tessera::cpu_adam_options_test
