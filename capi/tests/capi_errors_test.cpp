// Errors of the interface in C: their status, their message, and that all ranks get them.
#include <fstream>
#include <limits>
#include <thread>
#include <utility>

#include "c_model.h"
#include "support/scratch_directory.h"

namespace tessera::testing {
namespace capi_errors_test {

std::shared_ptr<Net> a_net(int64_t width = 37) {
  return seeded(7, [&] { return std::make_shared<Mlp>(width); });
}

// Shards a new net, and expects an error with `parts`, and tensors that are not sharded.
void expect_refused(const CWorld& world, const char* plan, const char* optimizer,
                    const std::vector<std::string>& parts,
                    tessera_status status = TESSERA_BAD_ARGUMENT) {
  const auto net = a_net();
  const PassedTensors passed(*net);
  tessera_model* model = nullptr;
  expect_failure(tessera_shard(world.handle, passed.names.data(), passed.tensors.data(),
                               passed.parameters, passed.buffers(), plan, optimizer, &model),
                 status, parts);
  EXPECT_EQ(model, nullptr);
  for (const NamedTensor& it : passed.held) EXPECT_FALSE(is_sharded(it.tensor));
}

class CErrors : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CErrors, ::testing::Values(1, 2, 3));

TEST_P(CErrors, RefusesWrongPlans) {
  run_c_world(GetParam(), [&](CWorld& world) {
    const auto refused = [&](const char* plan, const std::vector<std::string>& parts) {
      expect_refused(world, plan, nullptr, parts);
    };
    refused(R"({"unit_byte": 1})",
            {"[tessera_shard] `plan` has no 'unit_byte'; expected average, bucket_bytes, ",
             "param_dtype", "unit_bytes", "whole_numel"});
    for (const char* name : {"group", "process_group", "replicate_group", "groups", "outer", "cuts",
                             "device", "sync_buffers", "cast_inputs", "precision.param_dtype"})
      refused(("{\"" + std::string(name) + "\": null}").c_str(),
              {"`plan` has no '" + std::string(name) + "'; expected"});
    refused(R"({"level": "kParameters"})",
            {"'level' must be one of none os os_g p_g_os; got \"kParameters\""});
    refused(R"({"level": 3})", {"'level' in `plan` can't be read", "must be string"});
    refused(R"({"unit_bytes": 1.5})", {"unit_bytes must be a whole number", "got 1.5"});
    refused(R"({"prefetch": 10000000000})", {"prefetch must be a whole number"});
    refused(R"({"average": 1})", {"'average' in `plan` can't be read", "must be boolean"});
    refused(R"({"param_dtype": "bf16"})", {"'param_dtype' must be a dtype such as bfloat16"});
    refused(R"({"level": )", {"[tessera_shard] `plan` can't be read", "parse error"});
    refused("[1]", {"`plan` can't be read", "must be object"});
    refused(R"({"whole": ["no.such"]})", {"[fully_shard]", "no.such"});
    refused(R"({"unit_bytes": -1})", {"[fully_shard] plan.unit_bytes"});
  });
}

TEST_P(CErrors, RefusesWrongOptimizers) {
  run_c_world(GetParam(), [&](CWorld& world) {
    const auto refused = [&](const char* optimizer, const std::vector<std::string>& parts,
                             tessera_status status = TESSERA_BAD_ARGUMENT) {
      expect_refused(world, nullptr, optimizer, parts, status);
    };
    refused(R"({"name": "Adan", "lr": 1})",
            {"'name' in `optimizer` must be one of AdamW Adam CPUAdam SGD Adagrad RMSprop Muon; "
             "got 'Adan'"});
    refused("{}", {"'name' in `optimizer` must be one of", "got ''"});
    refused(R"({"name": "SGD", "betas": [0.9, 0.99]})",
            {"`optimizer` has no 'betas'; expected dampening, lr, momentum, name, nesterov, "
             "weight_decay"});
    refused(R"({"name": "AdamW", "lr": "1e-3"})",
            {"'lr' in `optimizer` can't be read", "must be number"});
    refused(R"({"name": "AdamW", "lr": -1})", {"[tessera_shard] ", "learning rate"},
            TESSERA_FAILED);  // LibTorch's own
    // Found once the tensors are sharded: its blocks of state can't be cut. The sharding is undone.
    if (world.size > 1)
      refused(R"({"name": "CPUAdam", "state_dtype": "uint8"})", {"[ShardedOptimizer]", "256"},
              TESSERA_NOT_IMPLEMENTED);
  });
}

TEST_P(CErrors, RefusesWrongTensors) {
  run_c_world(GetParam(), [&](CWorld& world) {
    torch::Tensor good = torch::ones({3}, torch::requires_grad()), undefined;
    const char *name = "weight", *none = nullptr;
    void *tensor = &good, *no_tensor = nullptr, *empty = &undefined;
    tessera_model* model = nullptr;
    const auto shard = [&](const char* const* names, void* const* tensors, int64_t count) {
      return tessera_shard(world.handle, names, tensors, count, 0, nullptr, nullptr, &model);
    };
    const auto refused = [&](tessera_status status, const std::string& part) {
      expect_failure(status, TESSERA_BAD_ARGUMENT, {part});
      EXPECT_EQ(model, nullptr);
    };
    refused(shard(nullptr, &tensor, 1), "[tessera_shard] `names` must not be null");
    refused(shard(&name, nullptr, 1), "`tensors` must not be null");
    refused(shard(&none, &tensor, 1), "each of `names` must not be null");
    refused(shard(&name, &no_tensor, 1), "each of `tensors` must not be null");
    refused(shard(&name, &empty, 1), "tensor 'weight' is undefined");
    refused(shard(nullptr, nullptr, 0), "[fully_shard] the model must have parameters");
    refused(tessera_shard(world.handle, &name, &tensor, 1, 0, nullptr, nullptr, nullptr),
            "`model` must not be null");
    refused(tessera_shard(nullptr, &name, &tensor, 1, 0, nullptr, nullptr, &model),
            "`world` must not be null");
    EXPECT_FALSE(is_sharded(good));
    torch::Tensor result = good * 2;
    void* const leafless = &result;
    refused(shard(&name, &leafless, 1), "must be a leaf");
    if (succeeds(shard(&name, &tensor, 1))) {
      tessera_model* const first = std::exchange(model, nullptr);
      refused(shard(&name, &tensor, 1), "is sharded already");
      tessera_free(first);
    }
  });
}

TEST_P(CErrors, RefusesNullEverywhere) {
  run_c_world(GetParam(), [&](CWorld& world) {
    const CModel model(world, a_net(), nullptr, nullptr);
    tessera_model* const it = model.handle;
    const auto refused = [&](tessera_status status, const std::string& part) {
      expect_failure(status, TESSERA_BAD_ARGUMENT, {part});
    };
    int number = -1;
    tessera_world* other = nullptr;
    torch::Tensor value;
    tessera_bytes bytes;
    refused(tessera_init(nullptr, nullptr, &number, &number), "[tessera_init] `world` must not be");
    refused(tessera_init("smoke signals", &other, &number, &number), "[init] `backend` must be");
    refused(tessera_zero_grad(nullptr), "[tessera_zero_grad] `model` must not be null");
    refused(tessera_clip(nullptr, 1, 2, nullptr), "[tessera_clip] `model` must not be null");
    refused(tessera_step(nullptr, -1), "[tessera_step] `model` must not be null");
    refused(tessera_step(it, -1), "the optimizer of `model` must not be null");
    refused(tessera_save(nullptr, "x"), "[tessera_save] `model` must not be null");
    refused(tessera_save(it, nullptr), "[tessera_save] `path` must not be null");
    refused(tessera_load(nullptr, "x", nullptr), "[tessera_load] `model` must not be null");
    refused(tessera_load(it, nullptr, nullptr), "[tessera_load] `path` must not be null");
    refused(tessera_gather(nullptr, "x", &value), "[tessera_gather] `model` must not be null");
    refused(tessera_gather(it, nullptr, &value), "[tessera_gather] `name` must not be null");
    refused(tessera_gather(it, "head.bias", nullptr), "`tensor` must not be null");
    refused(tessera_gather(it, "head.bia", &value), "the model has no parameter 'head.bia'");
    refused(tessera_memory(nullptr, &bytes), "[tessera_memory] `model` must not be null");
    refused(tessera_memory(it, nullptr), "[tessera_memory] `bytes` must not be null");
    EXPECT_EQ(number, -1);
    EXPECT_FALSE(value.defined());
    EXPECT_TRUE(succeeds(tessera_gather(it, "head.bias", &value)));
    EXPECT_EQ(value.numel(), 5);
  });
}

TEST_P(CErrors, RefusesCallsInAWrongState) {
  run_c_world(GetParam(), [&](CWorld& world) {
    const CModel model(world, a_net(), nullptr, R"({"name": "SGD"})");
    expect_failure(tessera_step(model.handle, -1), TESSERA_FAILED,
                   {"there must be a backward since the last zero_grad()"});
    expect_failure(tessera_clip(model.handle, -1, 2, nullptr), TESSERA_BAD_ARGUMENT, {"max_norm"});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    expect_failure(tessera_clip(model.handle, 1, nan, nullptr), TESSERA_BAD_ARGUMENT,
                   {"norm_type"});
  });
}

TEST_P(CErrors, RefusesCheckpointsOfOtherModels) {
  const ScratchDirectory scratch;
  const std::string path = scratch / "saved", none = scratch / "none";
  std::ofstream(scratch / "file") << "x";
  const std::string below_file = scratch / "file/saved";
  run_c_world(GetParam(), [&](CWorld& world) {
    const char* const optimizer = R"({"name": "SGD", "momentum": 0.9})";
    const CModel saved(world, a_net(), nullptr, optimizer);
    EXPECT_TRUE(succeeds(tessera_save(saved.handle, path.c_str())));
    EXPECT_NE(tessera_save(saved.handle, below_file.c_str()), TESSERA_OK);
    const CModel wider(world, a_net(/*width=*/41), nullptr, optimizer);
    const State before = wider.state();
    int64_t steps = -1;
    expect_failure(tessera_load(wider.handle, path.c_str(), &steps), TESSERA_BAD_ARGUMENT,
                   {"[load_checkpoint]", "head.weight", "41", "37"});
    expect_failure(tessera_load(wider.handle, none.c_str(), &steps), TESSERA_BAD_ARGUMENT,
                   {"[checkpoint] could not open the directory", none});
    EXPECT_EQ(steps, -1);
    expect_same_state(wider.state(), before, 0, "after loads that failed");
  });
}

TEST(CErrors, FailOnAllRanksIfOneShardsWrongly) {
  run_c_world(3, [&](CWorld& world) {
    const bool is_wrong = world.rank == 1;
    expect_refused(
        world, is_wrong ? R"({"levels": "os"})" : nullptr, nullptr,
        {is_wrong ? "[tessera_shard] `plan` has no 'levels'; expected" : "`plan` has no 'levels'",
         is_wrong ? "" : "(on rank 1 of 3)"});
    expect_refused(world, nullptr, is_wrong ? R"({"name": "Adam", "lr": true})" : nullptr,
                   {"'lr' in `optimizer` can't be read"});
    expect_refused(world, is_wrong ? R"({"level": "os"})" : nullptr, nullptr,
                   {"[fully_shard]", "level"});
    CModel model(world, a_net(), nullptr, nullptr);  // the next call succeeds
  });
}

TEST(CErrors, NameARankThatHasLeft) {
  run_c_world(2, [&](CWorld& world) {
    CModel model(world, a_net(), nullptr, nullptr);
    torch::Tensor value;
    if (world.rank == 1) {
      tessera_free(std::exchange(model.handle, nullptr));
      tessera_free(std::exchange(world.handle, nullptr));
    } else {
      expect_failure(tessera_gather(model.handle, "head.weight", &value), TESSERA_RANK_FAILED,
                     {"rank 1"});
      EXPECT_FALSE(value.defined());
    }
  });
}

TEST(CErrors, AreThoseOfTheirThread) {
  EXPECT_EQ(tessera_zero_grad(nullptr), TESSERA_BAD_ARGUMENT);
  const std::string message = tessera_error();
  std::thread([] { EXPECT_STREQ(tessera_error(), ""); }).join();
  run_c_world(1, [](CWorld&) {});
  EXPECT_EQ(tessera_error(), message) << "a call that succeeds keeps it";
}

}  // namespace capi_errors_test
}  // namespace tessera::testing
