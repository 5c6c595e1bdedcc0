// Arguments of `group_sharded_parallel` and the plans that they become.
#include <gtest/gtest.h>

#include <limits>

#include "dialects/tests/training.h"
#include "support/warnings.h"

namespace tessera::testing::group_sharded_plan_test {

using paddle::group_sharded_plan;
using paddle::GroupShardedOptions;

// Two layers of normalization, one of them inside a block.
struct Block : torch::nn::Module {
  Block()
      : norm(register_module("norm", torch::nn::GroupNorm(2, 8))),
        fc(register_module("fc", torch::nn::Linear(8, 8))) {}
  torch::nn::GroupNorm norm;
  torch::nn::Linear fc;
};
struct Normed : torch::nn::Module {
  Normed()
      : block(register_module("block", std::make_shared<Block>())),
        norm(register_module("norm", torch::nn::GroupNorm(2, 8))),
        head(register_module("head", torch::nn::Linear(8, 8))) {}
  std::shared_ptr<Block> block;
  torch::nn::GroupNorm norm;
  torch::nn::Linear head;
};

TEST(GroupSharded, GS_01_UnknownLevelIsRefusedAndHintsAtTheValidOnes) {
  const PaddleMlp model;
  for (const std::string level : {"p_g", "", "OS", "zero3", "g_os", "os_p"}) {
    const auto message = message_of<c10::ValueError>([&] { group_sharded_plan(model, level, {}); });
    expect_contains(message, {"The level must be os, os_g or p_g_os."});
    expect_contains(message, {"'" + level + "'"});
  }
  const auto hint = [&](const std::string& level) {
    return message_of<c10::ValueError>([&] { group_sharded_plan(model, level, {}); });
  };
  expect_contains(hint("p_g"), {"did you mean p_g_os?"});
  expect_contains(hint("os_p"), {"did you mean os_g?"});
}

TEST(GroupSharded, GS_04_HalfParametersWarnOnceThatTheScalerIsTheCallers) {
  PaddleMlp model;
  const auto warnings_in = [&](at::ScalarType dtype) {
    model.to(dtype);
    return warnings_of([&] { group_sharded_plan(model, "os_g", {}); });
  };
  EXPECT_TRUE(warnings_in(at::kFloat).empty());
  EXPECT_TRUE(warnings_in(at::kBFloat16).empty());
  const auto messages = warnings_in(at::kHalf);
  ASSERT_EQ(messages.size(), 1);
  expect_contains(messages[0], {"the input of scaler is None"});
  GradScaler scaler;
  Normed half;
  half.to(at::kHalf);
  EXPECT_TRUE(warnings_of([&] { group_sharded_plan(half, "os_g", {.scaler = &scaler}); }).empty());
}

TEST(GroupSharded, GS_29_ExcludeLayerTakesTypesDottedNamesAndAddresses) {
  const Normed model;
  using Names = std::vector<std::string>;
  const auto excluded = [&](decltype(GroupShardedOptions::exclude_layer) which) {
    GroupShardedOptions options;
    options.exclude_layer = std::move(which);
    return group_sharded_plan(model, "p_g_os", options).whole;
  };
  const Names both = {"block.norm.weight", "block.norm.bias", "norm.weight", "norm.bias"};
  EXPECT_EQ(excluded({}), Names());
  EXPECT_EQ(excluded({"GroupNorm"}), both);
  EXPECT_EQ(excluded({"torch::nn::GroupNormImpl"}), both);
  EXPECT_EQ(excluded({"block.norm"}), Names({"block.norm.weight", "block.norm.bias"}));
  EXPECT_EQ(excluded({model.norm.get()}), Names({"norm.weight", "norm.bias"}));
  // The user's own types need no namespace, and a layer stands for the layers inside it.
  const Names block = {"block.norm.weight", "block.norm.bias", "block.fc.weight", "block.fc.bias"};
  EXPECT_EQ(excluded({"Block"}), block);
  expect_contains(message_of<c10::ValueError>([&] { excluded({"GroupNrom"}); }), {"'GroupNrom'"});
  const torch::nn::Linear other(2, 2);
  expect_contains(message_of<c10::ValueError>([&] { excluded({other.get()}); }), {"address"});
}

TEST(GroupSharded, GS_29_ExcludeLayerIsIgnoredBelowTheLevelThatShardsParameters) {
  const Normed model;
  EXPECT_TRUE(group_sharded_plan(model, "os_g", {.exclude_layer = {"GroupNorm"}}).whole.empty());
}

TEST(GroupSharded, GS_30_NegativeSizesAreRefused) {
  const PaddleMlp model;
  expect_contains(message_of<c10::ValueError>(
                      [&] { group_sharded_plan(model, "os_g", {.buffer_max_size = -1}); }),
                  {"buffer_max_size must be GE than 0. Got -1"});
  expect_contains(message_of<c10::ValueError>(
                      [&] { group_sharded_plan(model, "p_g_os", {.segment_size = -7}); }),
                  {"segment_size must be GE than 0. Got -7"});
}

TEST(GroupShardedPlan, DefaultsBecomeThePlanOfEachLevel) {
  const PaddleMlp model;
  const auto os = group_sharded_plan(model, "os", {});
  EXPECT_EQ(os.level, ShardLevel::kOptimizerState);
  EXPECT_EQ(os.partition, Partition::kWholeParam);
  EXPECT_EQ(os.unit_bytes, int64_t{4} << 23);
  const auto os_g = group_sharded_plan(model, "os_g", {});
  EXPECT_EQ(os_g.level, ShardLevel::kGradients);
  EXPECT_EQ(os_g.partition, Partition::kWholeParam);
  EXPECT_EQ(os_g.unit_bytes, int64_t{4} << 23);
  const auto p_g_os = group_sharded_plan(model, "p_g_os", {});
  EXPECT_EQ(p_g_os.level, ShardLevel::kParameters);
  EXPECT_EQ(p_g_os.partition, Partition::kFlatEven);
  EXPECT_EQ(p_g_os.whole_numel, int64_t{1} << 20);
  EXPECT_EQ(p_g_os.prefetch, 2);
  EXPECT_EQ(p_g_os.resident_bytes, 0);
  for (const ShardPlan& plan : {os, os_g, p_g_os}) {
    EXPECT_TRUE(plan.average);
    EXPECT_EQ(plan.start_values, StartValues::kBroadcast);
    EXPECT_FALSE(plan.sync_buffers);
    EXPECT_TRUE(plan.units.empty());
    EXPECT_TRUE(plan.whole.empty());
    EXPECT_EQ(plan.process_group, nullptr);
  }
}

TEST(GroupShardedPlan, EachArgumentBecomesItsField) {
  const PaddleMlp model;
  const auto group = single_process_group();
  const auto plan = group_sharded_plan(model, "p_g_os",
                                       {.group = group,
                                        .sync_buffers = true,
                                        .buffer_max_size = 0,
                                        .segment_size = 5,
                                        .sync_comm = true});
  EXPECT_EQ(plan.process_group, group);
  EXPECT_TRUE(plan.sync_buffers);
  EXPECT_EQ(plan.unit_bytes, 0);
  EXPECT_EQ(plan.whole_numel, 5);
  EXPECT_EQ(plan.prefetch, 0);
  // Only p_g_os has segments and gathers.
  const auto os_g = group_sharded_plan(model, "os_g", {.segment_size = 5, .sync_comm = true});
  EXPECT_EQ(os_g.whole_numel, 0);
  EXPECT_EQ(os_g.prefetch, ShardPlan{}.prefetch);
}

TEST(GroupShardedPlan, BufferSizeCountsElementsOfTheModelsLargestDtype) {
  Normed model;
  const auto unit_bytes = [&](int64_t elements) {
    return group_sharded_plan(model, "os_g", {.buffer_max_size = elements}).unit_bytes;
  };
  EXPECT_EQ(unit_bytes(100), 400);
  model.head->to(torch::kBFloat16);
  EXPECT_EQ(unit_bytes(100), 400);
  model.to(torch::kBFloat16);
  EXPECT_EQ(unit_bytes(100), 200);
  EXPECT_GT(unit_bytes(std::numeric_limits<int64_t>::max()), int64_t{1} << 60);
}

TEST(GroupShardedPlan, OffloadIsAFlagAPlaceOrADirectory) {
  const PaddleMlp model;
  const auto plan_of = [&](std::variant<bool, std::string> offload) {
    GroupShardedOptions options;
    options.offload = std::move(offload);
    return group_sharded_plan(model, "os_g", options);
  };
  EXPECT_EQ(plan_of(false).offload, Offload::kNone);
  EXPECT_EQ(plan_of("none").offload, Offload::kNone);
  EXPECT_EQ(plan_of(true).offload, Offload::kHost);
  EXPECT_EQ(plan_of("cpu").offload, Offload::kHost);
  EXPECT_EQ(plan_of("/some/where").offload, Offload::kDirectory);
  EXPECT_EQ(plan_of("/some/where").offload_directory, "/some/where");
  expect_contains(message_of<c10::ValueError>([&] { plan_of(""); }), {"none, cpu or a directory"});
}

TEST(GroupShardedPlan, PrecisionClippingAndReplicasArePassedOn) {
  const PaddleMlp model;
  EXPECT_EQ(group_sharded_plan(model, "os_g", {}).precision.master_dtype, at::kFloat);
  const auto dp_group = single_process_group();
  const auto plan = group_sharded_plan(
      model, "os_g", {.dp_group = dp_group, .precision = {.reduce_dtype = at::kBFloat16}});
  EXPECT_EQ(plan.replicate_group, dp_group);
  EXPECT_EQ(plan.precision.reduce_dtype, at::kBFloat16);
  EXPECT_EQ(paddle::group_sharded_optimizer_options({}).max_grad_norm, 0);
  const auto options = paddle::group_sharded_optimizer_options(
      {.grad_clip = paddle::ClipGradByGlobalNorm{.clip_norm = 2, .no_clip = {"fc1.bias"}}});
  EXPECT_EQ(options.max_grad_norm, 2);
  EXPECT_EQ(options.clip.epsilon, 0) << "clip_norm / max(norm, clip_norm)";
  EXPECT_EQ(options.clip.exclude, std::vector<std::string>({"fc1.bias"}));
  expect_contains(message_of<c10::ValueError>([&] {
                    group_sharded_plan(model, "os_g",
                                       {.grad_clip = paddle::ClipGradByGlobalNorm{0}});
                  }),
                  {"clip_norm must be positive"});
}

}  // namespace tessera::testing::group_sharded_plan_test
