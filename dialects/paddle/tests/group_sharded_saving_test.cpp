// `save_group_sharded_model`, and uses of the files that it writes.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "dialects/tests/training.h"
#include "support/scratch_directory.h"

namespace tessera::testing::group_sharded_saving_test {

using namespace paddle;
namespace fs = std::filesystem;

// A job as a user would write it; every rank computes the whole batch, so that worlds of all sizes
// compute the same.
struct Job {
  Job(const std::string& level, at::ScalarType dtype, GroupShardedOptions options = {},
      const fs::path& before_wrapping = {})
      : dtype(dtype), net(make_mlp()), scaler({.init_scale = 256, .growth_interval = 3}) {
    net->to(dtype);
    inner = make_adamw(*net);
    if (!before_wrapping.empty())
      load_group_sharded_model(*net, before_wrapping, inner.get(), &scaler);
    options.scaler = &scaler;
    options.segment_size = 100;
    options.buffer_max_size = 700;
    sharded.emplace(group_sharded_parallel(net, *inner, level, options));
  }
  void step() {
    const Batch batch = global_batch(sharded->optimizer.steps(), kRows, kIn, kOut);
    sharded->optimizer.clear_grad();
    const auto out = sharded->model(batch.x.to(dtype)).to(torch::kFloat);
    scaler.scale(torch::mse_loss(out, batch.y)).backward();
    scaler.step(sharded->optimizer);
    scaler.update();
  }
  void save(const fs::path& path) {
    save_group_sharded_model(sharded->model, path, &sharded->optimizer);
  }
  void load(const fs::path& path) {
    load_group_sharded_model(sharded->model, path, &sharded->optimizer);
  }

  at::ScalarType dtype;
  std::shared_ptr<Net> net;
  std::unique_ptr<torch::optim::Optimizer> inner;
  GradScaler scaler;
  std::optional<GroupSharded<Net>> sharded;
};

TEST(GroupSharded, GS_40_TheOutputIsADirectoryThatIsMade) {
  const ScratchDirectory directory;
  run_world(2, [&](World& world) {
    Job job("os_g", at::kFloat);
    job.save(directory / "made" / "too");
    EXPECT_TRUE(fs::exists(directory / "made" / "too" / "index.json"));
    const fs::path file = directory / "file";
    if (world.rank() == 0) std::ofstream(file) << "text";
    world.process_group()->barrier({});
    expect_contains(message_of<c10::ValueError>([&] { job.save(file); }),
                    {"Saving directory (" + file.string() + ") should be a directory, not a file"});
  });
}

// Header of a safetensors file.
nlohmann::json header_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), sizeof(length));
  std::string text(length, ' ');
  file.read(text.data(), static_cast<std::streamsize>(length));
  return nlohmann::json::parse(text);
}

TEST(GroupSharded, GS_41_ModelFilesHoldWholeNamedParametersAndTheOptimizerIsOptional) {
  const ScratchDirectory directory;
  for (const std::string level : {"os", "os_g", "p_g_os"}) {
    const fs::path model_only = directory / (level + "_model"), both = directory / level;
    run_world(3, [&](World&) {
      Job job(level, at::kBFloat16);
      job.step();
      save_group_sharded_model(job.sharded->model, model_only);
      job.save(both);
    });
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(both)) {
      if (!entry.path().filename().string().starts_with("model-")) continue;
      const auto header = header_of(entry.path());
      for (const auto& [name, tensor] : header.items()) {
        if (name == "__metadata__") continue;
        EXPECT_TRUE(names.insert(name).second) << name << " twice";
        EXPECT_EQ(tensor.at("dtype"), "BF16");
        const auto param = make_mlp()->named_parameters()[name];
        EXPECT_EQ(tensor.at("shape").get<std::vector<int64_t>>(), param.sizes().vec());
      }
    }
    EXPECT_EQ(names.size(), make_mlp()->named_parameters().size());
    run_world(2, [&](World&) {
      Job job(level, at::kBFloat16);
      load_group_sharded_model(job.sharded->model, model_only);
      expect_contains(message_of<c10::ValueError>([&] { job.load(model_only); }),
                      {"saved without one"});
      job.load(both);
      EXPECT_EQ(job.sharded->optimizer.steps(), 1);
    });
  }
}

TEST(GroupSharded, GS_42_AModelThatIsNotWrappedIsRefused) {
  const PaddleMlp plain;
  expect_contains(
      message_of<c10::ValueError>([&] { save_group_sharded_model(plain, "/nowhere/at/all"); }),
      {"Please use the layer which is wrapped with group_sharded_parallel."});
  const ScratchDirectory directory;
  run_world(2, [&](World&) {
    Job job("p_g_os", at::kFloat), other("p_g_os", at::kFloat);
    save_group_sharded_model(*job.net, directory / "by_module", &job.sharded->optimizer);
    EXPECT_ANY_THROW(save_group_sharded_model(job.sharded->model, directory / "other",
                                              &other.sharded->optimizer));
    EXPECT_FALSE(fs::exists(directory / "other"));
  });
  // An optimizer that is not wrapped does not compile.
  static_assert(!std::is_invocable_v<
                decltype([](auto&&... args) -> decltype(save_group_sharded_model(args...)) {}),
                ShardedModule&, fs::path, torch::optim::Optimizer*>);
}

TEST(GroupSharded, GS_43_StateIsLoadedBeforeOrAfterWrapping) {
  const ScratchDirectory directory;
  for (const std::string level : {"os_g", "p_g_os"}) {
    run_world(2, [&](World&) {
      Job first(level, at::kFloat);
      for (int i = 0; i < 3; ++i) first.step();
      first.save(directory / level);
      Job after(level, at::kFloat), before(level, at::kFloat, {}, directory / level);
      after.load(directory / level);
      before.sharded->optimizer.set_steps(3);
      EXPECT_EQ(after.scaler.state(), first.scaler.state());
      EXPECT_EQ(before.scaler.state(), first.scaler.state());
      for (int i = 0; i < 3; ++i) first.step(), after.step(), before.step();
      const auto expected = first.sharded->model.full_state();
      expect_same_state(after.sharded->model.full_state(), expected, 0, "after wrapping");
      expect_same_state(before.sharded->model.full_state(), expected, 0, "before wrapping");
    });
  }
}

TEST(GroupSharded, GS_44_SwappedArgumentsDoNotCompile) {
  const auto save = [](auto&&... args) -> decltype(save_group_sharded_model(args...)) {};
  using Save = decltype(save);
  static_assert(std::is_invocable_v<Save, ShardedModule&, const char*, GroupShardedOptimizer*>);
  static_assert(!std::is_invocable_v<Save, ShardedModule&, GroupShardedOptimizer*, const char*>);
  SUCCEED();
}

TEST(GroupSharded, GS_45_TheStateOfAllRanksIsSavedAndGoesOnAnywhereWithTheSameLosses) {
  const ScratchDirectory directory;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<NamedTensor> expected;
    const double tolerance = dtype == at::kFloat ? 1e-5 : 2e-2;
    run_world(2, [&](World& world) {
      Job job("p_g_os", dtype);
      for (int i = 0; i < 4; ++i) job.step();
      job.save(directory / "two");
      Job resumed("p_g_os", dtype);
      resumed.load(directory / "two");
      for (int i = 0; i < 4; ++i) job.step(), resumed.step();
      const auto state = job.sharded->model.full_state();
      expect_same_state(resumed.sharded->model.full_state(), state, 0, "the same world size");
      if (world.rank() == 0) expected = state;
    });
    fs::path from = directory / "two";
    const std::vector<std::tuple<int, std::string, std::string>> others = {
        {3, "os_g", "none"}, {1, "p_g_os", "none"}, {4, "os", "cpu"}, {3, "p_g_os", "files"}};
    for (const auto& [ranks, level, offload] : others) {
      const std::string where = offload == "files" ? directory / "files" : fs::path(offload);
      run_world(ranks, [&, level = level](World& world) {
        Job job(level, dtype, {.offload = where});
        job.load(from);
        EXPECT_EQ(job.sharded->optimizer.steps(), 4);
        for (int i = 0; i < 4; ++i) job.step();
        expect_same_state(job.sharded->model.full_state(), expected, tolerance,
                          std::to_string(world.size()) + " ranks, " + level);
      });
    }
  }
}

TEST(GroupSharded, GS_45_ReplicasSaveOneCopyTogether) {
  const ScratchDirectory directory;
  std::vector<NamedTensor> expected;
  run_world(4, [&](World& world) {
    const auto process_groups = world.hybrid_process_groups(2);
    Job job("p_g_os", at::kBFloat16,
            {.group = process_groups.shard, .dp_group = process_groups.replicate});
    for (int i = 0; i < 2; ++i) job.step();
    job.save(directory / "hybrid");
    save_checkpoint(directory / "shards", job.sharded->model, &job.sharded->optimizer);
    for (int i = 0; i < 2; ++i) job.step();
    const auto state = job.sharded->model.full_state();
    if (world.rank() == 0) expected = state;
  });
  for (const char* kind : {"hybrid", "shards"}) {
    run_world(2, [&](World&) {
      Job job("p_g_os", at::kBFloat16);
      load_checkpoint(directory / kind, job.sharded->model, &job.sharded->optimizer,
                      {.scaler = std::string(kind) == "hybrid" ? &job.scaler : nullptr});
      for (int i = 0; i < 2; ++i) job.step();
      // Sums over ranks of equal gradients are exact: two halves or four quarters.
      expect_same_state(job.sharded->model.full_state(), expected, 0, kind);
    });
  }
}

TEST(GroupSharded, GS_46_AModelNeedsNotBeWholeOnARankBeforeItIsSharded) {
  struct Big : Net {
    Big() {
      for (int i = 0; i < 6; ++i) fcs->push_back(torch::nn::Linear(256, 256));
      register_module("fcs", fcs);
    }
    torch::Tensor forward(torch::Tensor x) override { return fcs->forward(x); }
    torch::nn::Sequential fcs;
  };
  for (const std::string level : {"os", "os_g", "p_g_os"}) {
    run_world(2, [&](World& world) {
      const auto eager = seeded(5, [] { return std::make_shared<Big>(); });
      manual_seed(5);
      const auto deferred = [] {
        const DeferredInit scope;
        return std::make_shared<Big>();
      }();
      EXPECT_TRUE(is_deferred(deferred->parameters()[0]));
      torch::optim::SGD inner(deferred->parameters(), torch::optim::SGDOptions(0.1));
      auto [model, optimizer, scaler] = group_sharded_parallel(deferred, inner, level);
      expect_same_state(model.full_state(), plain_state(*eager), 0, level);
      rows_of(model(torch::ones({4, 256})), world.rank(), 2).sum().backward();
      optimizer.step();
    });
  }
}

}  // namespace tessera::testing::group_sharded_saving_test
