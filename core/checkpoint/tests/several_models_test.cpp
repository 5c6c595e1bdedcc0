// Several models in one checkpoint, texts, and the best of a series.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/engine/exponential_average.h>

#include <fstream>
#include <limits>

#include "checkpoint/tests/saved_job.h"
#include "support/file_size_limit.h"

namespace tessera::testing::several_models_test {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

// Two sharded models at different levels, the average of one, and a plain model.
struct Pair {
  explicit Pair(uint64_t seed)
      : first(seed, plans()[3]),
        second(seed + 1, plans()[1]),
        average(first.sharded, 0.5),
        plain(make_picture(seed + 2)) {}

  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      first.train(step, step + 1);
      second.train(step, step + 1);
      average.update();
    }
  }
  std::vector<CheckpointModel> models() {
    return {{"first", first.sharded, &first.optimizer},
            {"second", second.sharded, &second.optimizer},
            {"average", average},
            {"plain", *plain}};
  }
  std::vector<NamedTensor> states() {
    std::vector<NamedTensor> all;
    const auto add = [&](const std::string& model, const std::vector<NamedTensor>& state) {
      for (const auto& [name, tensor] : state) all.push_back({model + "/" + name, tensor});
    };
    add("first", first.sharded.full_state());
    add("second", second.sharded.full_state());
    add("average", average.evaluate([&] { return first.sharded.full_state(); }));
    return all;
  }

  Job first, second;
  ExponentialAverage average;
  std::shared_ptr<Picture> plain;
};

TEST(SeveralModels, GoOnWithTheSameBitsAtAnyNumberOfRanks) {
  const ScratchDirectory scratch;
  std::vector<NamedTensor> now, later;
  run_world(2, [&](World& world) {
    Pair pair(1);
    pair.train(0, 2);
    save_checkpoint(
        scratch / "step-2", pair.models(),
        {.numbers = {{"step", 2}}, .texts = {{"config", R"({"width": 13, "é": "\n"})"}}});
    const auto states = pair.states();
    pair.train(2, 4);
    const auto last = pair.states();
    if (world.rank() == 0) now = states, later = last;
  });
  EXPECT_EQ(names_in(scratch / "step-2"),
            (Lines{"average", "first", "index.json", "plain", "rank-00000-of-00002.safetensors",
                   "rank-00001-of-00002.safetensors", "second"}));
  for (const int ranks : {2, 1, 3}) {
    run_world(ranks, [&](World&) {
      Pair pair(50);
      const auto loaded = load_checkpoint(scratch / "step-2", pair.models());
      EXPECT_EQ(loaded.numbers, (std::map<std::string, double>{{"step", 2}}));
      EXPECT_EQ(loaded.texts.at("config"), R"({"width": 13, "é": "\n"})");
      EXPECT_EQ(pair.average.updates(), 2);
      expect_same_state(pair.states(), now, 0, fmt::format("loaded by {}", ranks));
      expect_same_state(plain_state(*pair.plain), plain_state(*make_picture(3)), 0, "plain");
      if (ranks != 2) return;
      pair.train(2, 4);
      expect_same_state(pair.states(), later, 0, "two steps later");
    });
  }
}

TEST(SeveralModels, EachIsACheckpointOfItsOwn) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    Pair pair(1);
    pair.train(0, 2);
    save_checkpoint(scratch / "both", pair.models());
    const auto want = pair.average.evaluate([&] { return pair.first.sharded.full_state(); });
    Job job(9, plans()[4]);
    load_checkpoint(scratch / "both" / "average", job.sharded, nullptr);
    expect_same_state(job.sharded.full_state(), want, 0, "the average as a model");
    load_checkpoint(scratch / "both" / "second", job.sharded, &job.optimizer);
    expect_same_state(job.sharded.full_state(), pair.second.sharded.full_state(), 0, "the second");
    EXPECT_EQ(job.optimizer.steps(), 2);
    expect_contains(error_of([&] { load_checkpoint(scratch / "both", job.sharded, nullptr); }),
                    {"holds several models (first, second, average, plain)", "both/first'"});
    expect_contains(error_of([&] {
                      load_checkpoint(scratch / "both" / "first", {{"a", job.sharded}});
                    }),
                    {"holds one model without a name"});
  });
  for (const char* name : {"first", "second", "average", "plain"})
    EXPECT_EQ(verify_checkpoint(scratch / "both" / name), Lines()) << name;
}

std::string all_of(const Lines& lines) { return fmt::format("{}", fmt::join(lines, "\n")); }

TEST(SeveralModels, AreAllVerifiedComparedAndCounted) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    Pair pair(1);
    for (const char* const name : {"one", "two"}) {
      pair.train(0, 1);
      save_checkpoint(scratch / name, pair.models());
    }
  });
  const fs::path one = scratch / "one", two = scratch / "two", second = one / "second";
  const CheckpointSummary summary = inspect_checkpoint(one);
  EXPECT_EQ(summary.models, (Lines{"first", "second", "average", "plain"}));
  EXPECT_GT(summary.nbytes,
            inspect_checkpoint(one / "first").nbytes + inspect_checkpoint(second).nbytes);
  EXPECT_EQ(verify_checkpoint(one), Lines());
  EXPECT_EQ(compare_checkpoints(one, one), Lines());
  const Lines differences = compare_checkpoints(one, two);
  for (const std::string name : {"first", "second", "average"})
    EXPECT_TRUE(std::ranges::any_of(differences, [&](const std::string& line) {
      return line.starts_with("model '" + name + "', ");
    })) << name;
  expect_contains(error_of([&] { reshard_checkpoint(one, scratch / "three", 3); }),
                  {"has several models, first, second, average, plain", "one/first'"});
  EXPECT_FALSE(fs::exists(scratch / "three"));
  EXPECT_EQ(list_checkpoints(scratch.path()).front().problem, "");
  fs::remove(second / "rank-00001-of-00002.safetensors");
  expect_contains(all_of(verify_checkpoint(one)), {"one/second/rank-00001"});
  expect_contains(list_checkpoints(scratch.path()).front().problem, {"one/second/rank-00001"});
  fs::remove(second / "index.json");
  expect_contains(all_of(verify_checkpoint(one)), {"one/second"});
}

TEST(SeveralModels, DifferencesAreRefusedBeforeAnythingChanges) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    Pair pair(1);
    pair.train(0, 1);
    save_checkpoint(scratch / "all", pair.models());
    Job other(7, plans()[3]);
    const auto before = other.sharded.full_state();
    auto wrong = std::make_shared<Mlp>();
    auto misfit = fully_shard(wrong);
    const auto load = [&](const std::vector<CheckpointModel>& models,
                          const LoadOptions& options = {}) {
      return load_checkpoint(scratch / "all", models, options);
    };
    expect_contains(error_of([&] {
                      load({{"first", other.sharded}});
                    }),
                    {"not loaded: average, plain, second"});
    expect_contains(
        error_of([&] {
          load({{"first", other.sharded}, {"third", misfit}}, {.allow_unexpected = true});
        }),
        {"missing: third"});
    expect_contains(
        error_of([&] {
          load({{"first", other.sharded}, {"second", misfit}}, {.allow_unexpected = true});
        }),
        {"all/second", "must fit the model"});
    expect_same_state(other.sharded.full_state(), before, 0, "after refusals");
    const auto loaded = load({{"first", other.sharded}, {"third", misfit}},
                             {.allow_missing = true, .allow_unexpected = true});
    EXPECT_EQ(loaded.missing, Lines{"third"});
    EXPECT_EQ(loaded.unexpected, (Lines{"average", "plain", "second"}));
    expect_same_state(other.sharded.full_state(), pair.first.sharded.full_state(), 0, "loaded");
  });
}

TEST(SeveralModels, WrongModelsAreRefused) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    Pair pair(1);
    const auto save = [&](const std::vector<CheckpointModel>& models) {
      save_checkpoint(scratch / "x", models);
    };
    expect_contains(error_of([&] { save({}); }), {"must not be empty"});
    expect_contains(error_of([&] { save({{"../a", pair.first.sharded}}); }), {"letters, digits"});
    expect_contains(error_of([&] {
                      save({{"a", pair.first.sharded}, {"a", pair.second.sharded}});
                    }),
                    {"'a' twice"});
    expect_contains(error_of([&] { save({{"a", pair.average}}); }), {"call update() after a step"});
    // Ranks that save other models must not wait for each other.
    expect_contains(error_of([&] {
                      save({{world.rank() == 0 ? "a" : "b", pair.first.sharded}});
                    }),
                    {"must have the same names"});
  });
  EXPECT_EQ(names_in(scratch.path()), Lines());
}

// A disk that is full in the middle of the second model.
TEST(SeveralModels, OldCheckpointStaysIfOneModelCantBeWritten) {
  const ScratchDirectory scratch;
  Pair pair(1);
  pair.train(0, 1);
  save_checkpoint(scratch / "x", pair.models(), {.numbers = {{"step", 1}}});
  pair.train(1, 2);
  {
    const auto size =
        static_cast<int64_t>(fs::file_size(scratch / "x/first/rank-00000-of-00001.safetensors"));
    const FileSizeLimit limit(size - 1000);
    EXPECT_NE(error_of([&] { save_checkpoint(scratch / "x", pair.models()); }), "");
  }
  EXPECT_EQ(names_in(scratch.path()), Lines{"x"});
  EXPECT_EQ(load_checkpoint(scratch / "x", pair.models()).numbers.at("step"), 1);
}

TEST(SeveralModels, AreWrittenInTheBackgroundAndWhole) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    Pair pair(1);
    pair.train(0, 1);
    AsyncCheckpointer checkpointer;
    checkpointer.save(scratch / "step-1", pair.models(), {.keep_last = 1});
    const auto want = pair.states();
    pair.train(1, 2);
    checkpointer.save(scratch / "step-2", pair.models(), {.keep_last = 1});
    checkpointer.wait();
    EXPECT_NE(error_of([&] {
                checkpointer.save(scratch / "w", pair.models(), {.whole_parameters = true});
              }),
              "");
    save_checkpoint(
        scratch / "whole",
        {{"first", pair.first.sharded, &pair.first.optimizer}, {"second", pair.second.sharded}},
        {.whole_parameters = true});
    Job job(4, plans()[0]);
    load_checkpoint(scratch / "whole" / "first", job.sharded, &job.optimizer);
    expect_same_state(job.sharded.full_state(), pair.first.sharded.full_state(), 0, "whole");
  });
  EXPECT_EQ(names_in(scratch.path()), (Lines{"step-2", "whole"}));
  EXPECT_TRUE(fs::exists(scratch / "whole/second/model-00001-of-00002.safetensors"));
}

// A directory that a user has put into a checkpoint is not removed with it.
TEST(SeveralModels, OnlyDirectoriesOfModelsAreReplaced) {
  const ScratchDirectory scratch;
  Pair pair(1);
  pair.train(0, 1);
  save_checkpoint(scratch / "x", pair.models());
  save_checkpoint(scratch / "x", {{"first", pair.first.sharded}});
  EXPECT_FALSE(fs::exists(scratch / "x/second"));
  fs::create_directories(scratch / "x/notes");
  std::ofstream(scratch / "x/notes/mine.txt") << "mine";
  expect_contains(error_of([&] { save_checkpoint(scratch / "x", pair.models()); }),
                  {"it has 'notes'"});
  EXPECT_TRUE(fs::exists(scratch / "x/notes/mine.txt"));
}

void save_with(const fs::path& path, double score, bool highest = false) {
  save_checkpoint(
      path, *make_picture(1), nullptr,
      {.numbers = {{"score", score}}, .keep_last = 2, .keep_best = BestBy{"score", highest}});
}

TEST(KeepBest, KeepsTheBestBesideTheLast) {
  const ScratchDirectory scratch;
  int step = 0;
  for (const double score : {3.0, 1.0, std::numeric_limits<double>::quiet_NaN(), 2.0, 1.0, 5.0})
    save_with(scratch / fmt::format("step-{}", ++step), score);
  EXPECT_EQ(names_in(scratch.path()), (Lines{"step-2", "step-5", "step-6"}));
  EXPECT_EQ(best_checkpoint(scratch.path(), {"score"}), scratch / "step-2");
  EXPECT_EQ(best_checkpoint(scratch.path(), {"score", true}), scratch / "step-6");
  EXPECT_EQ(best_checkpoint(scratch.path(), {"other"}), std::nullopt);
  EXPECT_EQ(best_checkpoint(scratch / "none", {"score"}), std::nullopt);
  save_with(scratch / "step-7", 0.5);  // better: the old best is removed
  EXPECT_EQ(names_in(scratch.path()), (Lines{"step-6", "step-7"}));
}

TEST(KeepBest, HighestAndWrongOptions) {
  const ScratchDirectory scratch;
  for (const int step : {1, 2, 3, 4}) save_with(scratch / fmt::format("e-{}", step), -step, true);
  EXPECT_EQ(names_in(scratch.path()), (Lines{"e-1", "e-3", "e-4"}));
  const auto save = [&](const SaveOptions& options) {
    save_checkpoint(scratch / "e-5", *make_picture(1), nullptr, options);
  };
  expect_contains(error_of([&] { save({.keep_best = BestBy{"score"}}); }),
                  {"keep_best needs options.keep_last"});
  expect_contains(error_of([&] { save({.keep_last = 1, .keep_best = BestBy{"score"}}); }),
                  {"'score' must be in options.numbers"});
  EXPECT_FALSE(fs::exists(scratch / "e-5"));
}

}  // namespace tessera::testing::several_models_test
