#include "checkpoint/tests/saved_job.h"
#include "engine/model/sharded_state.h"

namespace tessera::testing::whole_parameters_test {

namespace fs = std::filesystem;

const SaveOptions kWhole = {.whole_parameters = true, .random_state = false};

TEST(CheckpointWholeParameters, LieUnderPlainNamesInTheirShapes) {
  const ScratchDirectory scratch;
  std::vector<NamedTensor> state;
  run_world(3, [&](World& world) {
    Job job(1, plans()[3]);
    job.train(0, 1);
    save_checkpoint(scratch / "one", job.sharded, &job.optimizer, kWhole);
    const auto full = job.sharded.full_state();
    if (world.rank() == 0) state = full;
  });
  const auto names = names_in(scratch / "one");
  EXPECT_EQ(names[1], "model-00001-of-00003.safetensors");
  EXPECT_EQ(std::count_if(names.begin(), names.end(),
                          [](const auto& name) { return name.starts_with("model-"); }),
            3);
  std::map<std::string, std::pair<nlohmann::json, std::string>> stored;  // entry and bytes
  std::map<std::string, std::string> ties;
  for (const auto& name : names) {
    if (!name.starts_with("model-")) continue;
    const ParsedFile file = parse_safetensors((scratch / "one") / name);
    for (const auto& [key, value] : file.header.items()) {
      if (key == "__metadata__") {
        EXPECT_EQ(value.at("format"), "pt");
        for (const auto& [other, first] : value.items()) ties[other] = first;
        continue;
      }
      const int64_t begin = value.at("data_offsets").at(0), end = value.at("data_offsets").at(1);
      EXPECT_FALSE(stored.contains(key)) << key << " is stored twice";
      stored[key] = {value, file.data.substr(begin, end - begin)};
    }
  }
  for (const auto& [name, tensor] : state) {
    const auto& [entry, bytes] = stored.at(ties.contains(name) ? ties.at(name) : name);
    EXPECT_EQ(entry.at("shape"), tensor.sizes().vec()) << name;
    const torch::Tensor ordered = tensor.cpu().contiguous();
    EXPECT_EQ(bytes, std::string(static_cast<char*>(ordered.data_ptr()), ordered.nbytes())) << name;
  }
  EXPECT_EQ(ties.count("encode.weight") + ties.count("decode"), 1u);
  EXPECT_EQ(stored.size(), state.size() - 1);
}

TEST(CheckpointWholeParameters, WithoutAnOptimizerThereAreOnlyModelFiles) {
  const ScratchDirectory scratch;
  run_world(3, [&](World&) {
    auto sharded = fully_shard(make_picture(1), {.unit_bytes = 1 << 20});  // two units
    save_checkpoint(scratch / "one", sharded, nullptr, kWhole);
    load_checkpoint(scratch / "one", sharded, nullptr);
  });
  EXPECT_EQ(names_in(scratch / "one"),
            (std::vector<std::string>{"index.json", "model-00001-of-00002.safetensors",
                                      "model-00002-of-00002.safetensors"}));
}

TEST(CheckpointWholeParameters, AreGatheredUnitByUnit) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    auto module = on_test_device(std::make_shared<Mlp>(32, 4, 5));
    auto sharded = fully_shard(module, {.unit_bytes = 0, .resident_bytes = -1});
    ASSERT_EQ(sharded.memory().peak_unsharded, 0);
    save_checkpoint(scratch / "one", sharded, nullptr, kWhole);
    int64_t largest = 0;
    for (const auto& unit : sharded.state()->units()) {
      largest = std::max(largest, unit->layout().nbytes());
      EXPECT_EQ(unit->state(), Unit::State::kSharded);
    }
    EXPECT_EQ(sharded.memory().peak_unsharded, largest);
  });
}

// The state after four steps, with or without saves between them.
std::vector<NamedTensor> train_with_saves(const ShardPlan& plan, const fs::path& path) {
  std::vector<NamedTensor> state;
  run_world(2, [&](World& world) {
    Job job(1, plan);
    for (int64_t step = 0; step < 4; ++step) {
      job.train(step, step + 1);
      if (!path.empty()) save_checkpoint(path, job.sharded, &job.optimizer, kWhole);
      if (path.empty() || step != 2) continue;
      const auto unsharded = job.sharded.keep_unsharded();
      save_checkpoint(path, job.sharded, &job.optimizer, kWhole);
    }
    const auto full = job.sharded.full_state();
    if (world.rank() == 0) state = full;
  });
  return state;
}

TEST(CheckpointWholeParameters, SavingThemChangesNothing) {
  const ScratchDirectory scratch;
  for (const ShardPlan& plan : plans()) {
    expect_same_state(train_with_saves(plan, scratch / "one"), train_with_saves(plan, {}), 0,
                      describe(2, plan));
  }
}

TEST(CheckpointWholeParameters, RanksMustAgreeOnThem) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    Filled model(1);
    expect_contains(error_of([&] {
                      save_checkpoint(scratch / "one", *model.sharded, nullptr,
                                      {.whole_parameters = world.rank() == 1});
                    }),
                    {"must be the same on all ranks"});
  });
  EXPECT_TRUE(names_in(scratch / "").empty());
}

TEST(CheckpointWholeParameters, EitherKindReplacesTheOther) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    save_checkpoint(scratch / "one", *Filled(1).sharded, nullptr, kWhole);
    save_checkpoint(scratch / "one", *Filled(2).sharded, nullptr, {.random_state = false});
    expect_holds(scratch / "one", 2);
    save_checkpoint(scratch / "one", *Filled(3).sharded, nullptr, kWhole);
    expect_holds(scratch / "one", 3);
  });
  EXPECT_EQ(names_in(scratch / "one").size(), 3u);
  EXPECT_EQ(names_in(scratch / ""), std::vector<std::string>{"one"});
}

TEST(CheckpointWholeParameters, ModelFilesOfOtherToolsAreNotReplaced) {
  const ScratchDirectory scratch;
  fs::create_directories(scratch / "one");
  std::ofstream((scratch / "one") / "model-00001-of-00002.safetensors") << "theirs";
  run_world(2, [&](World&) {
    Filled model(1);
    expect_contains(
        error_of([&] { save_checkpoint(scratch / "one", *model.sharded, nullptr, kWhole); }),
        {"it has files, but no index.json"});
  });
  EXPECT_EQ(read_text((scratch / "one") / "model-00001-of-00002.safetensors"), "theirs");
}

}  // namespace tessera::testing::whole_parameters_test
