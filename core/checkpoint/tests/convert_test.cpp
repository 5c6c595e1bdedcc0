// Checkpoints rewritten for other numbers of ranks, and compared.
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fmt/ranges.h>
#include <tessera/interop/exchange.h>

#include "checkpoint/tests/saved_job.h"
#include "support/pickle_program.h"

namespace tessera::testing::convert_test {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

// --- reshard
// ---------------------------------------------------------------------------------------

std::vector<NamedTensor> load_on(int ranks, const fs::path& path) {
  std::vector<NamedTensor> state;
  run_world(ranks, [&](World& world) {
    Job job(2, plans()[3]);
    EXPECT_EQ(load_checkpoint(path, job.sharded, &job.optimizer).numbers.at("step"), 2);
    const auto full = job.sharded.full_state();
    if (world.rank() == 0) state = full;
  });
  return state;
}

TEST(CheckpointReshard, KeepsEverythingForEveryNumberOfRanks) {
  const ScratchDirectory scratch;
  for (const bool whole : {false, true}) {
    const Saved saved = save_in_middle(2, plans()[3], whole, scratch / "on2");
    reshard_checkpoint(scratch / "on2", scratch / "on3", 3);
    reshard_checkpoint(scratch / "on3", scratch / "on1", 1);
    for (const int ranks : {1, 3}) {
      const fs::path path = scratch / fmt::format("on{}", ranks);
      EXPECT_EQ(compare_checkpoints(scratch / "on2", path), Lines()) << ranks;
      EXPECT_EQ(verify_checkpoint(path), Lines()) << ranks;
      EXPECT_EQ(inspect_checkpoint(path).ranks, ranks);
      EXPECT_EQ(names_in(path).size(), static_cast<size_t>(ranks) + 1);
      expect_same_tensors(read_all(path), read_all(scratch / "on2"), "resharded");
      for (const int others : {1, 2, 3})
        expect_same_state(load_on(others, path), saved.state, 0, saved.describe());
    }
  }
}

TEST(CheckpointReshard, CutsEachTensorEvenly) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    save_state_dict(scratch / "on2", {{"a", on_test_device(torch::arange(31.))},
                                      {"b", torch::ones({2}, test_device())}});
  });
  reshard_checkpoint(scratch / "on2", scratch / "on3", 3);
  std::map<std::string, Lines> pieces;
  const auto index = read_index(scratch / "on3");
  for (const auto& tensor : index.at("tensors")) {
    for (const auto& chunk : tensor.at("chunks"))
      pieces[tensor.at("names").at(0)].push_back(
          fmt::format("{}: {} to {}", chunk.at("file").get<std::string>().substr(0, 10),
                      chunk.at("begin").get<int>(), chunk.at("end").get<int>()));
  }
  EXPECT_EQ(pieces["a"],
            (Lines{"rank-00000: 0 to 11", "rank-00001: 11 to 22", "rank-00002: 22 to 31"}));
  EXPECT_EQ(pieces["b"], (Lines{"rank-00000: 0 to 1", "rank-00001: 1 to 2"}));
}

TEST(CheckpointReshard, PutsBlocksOfDistTensorsTogether) {
  const ScratchDirectory scratch;
  const torch::Tensor value = torch::arange(60.).view({6, 10});
  run_world(4, [&](World& world) {
    const auto mesh = DeviceMesh::over_world(world, {2, 2});
    save_state_dict(scratch / "on4",
                    {{"a", distribute(on_test_device(value), mesh, {Shard{0}, Shard{1}})}});
  });
  reshard_checkpoint(scratch / "on4", scratch / "on3", 3);
  EXPECT_EQ(compare_checkpoints(scratch / "on4", scratch / "on3"), Lines());
  expect_same_tensors(read_all(scratch / "on3"), {{"tensor/a", value}}, "of blocks");
}

TEST(CheckpointReshard, KeepsWhatRanksHadForThemselvesIfThereStillAre) {
  const ScratchDirectory scratch;
  run_world(3, [&](World& world) {
    Filled model(1);
    save_checkpoint(
        scratch / "on3", *model.sharded, nullptr,
        {.rank_state = {{"mine", on_test_device(torch::full({5}, world.rank() + 10))}}});
  });
  reshard_checkpoint(scratch / "on3", scratch / "on2", 2);
  reshard_checkpoint(scratch / "on2", scratch / "on4", 4);
  for (const char* name : {"on2", "on4"}) {
    run_world(4, [&](World& world) {
      Filled model(2);
      const auto loaded = load_checkpoint(scratch / name, *model.sharded, nullptr).rank_state;
      ASSERT_EQ(loaded.size(), world.rank() < 2 ? 1u : 0u) << name;
      if (world.rank() < 2) {
        EXPECT_TRUE((loaded.at("mine") == world.rank() + 10).all().item<bool>());
      }
    });
  }
}

TEST(CheckpointReshard, MayReplaceWhatItReads) {
  const ScratchDirectory scratch;
  const Saved saved = save_in_middle(3, plans()[3], false, scratch / "one");
  reshard_checkpoint(scratch / "one", scratch / "one", 2);
  EXPECT_EQ(inspect_checkpoint(scratch / "one").ranks, 2);
  expect_same_state(load_on(2, scratch / "one"), saved.state, 0, saved.describe());
}

TEST(CheckpointReshard, WhatCantBeReadIsRefusedAndNothingIsLeft) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) { save_checkpoint(scratch / "one", *Filled(1).sharded, nullptr); });
  const auto error = [&](const fs::path& from, int ranks) {
    return error_of([&] { reshard_checkpoint(from, scratch / "to", ranks); });
  };
  expect_contains(error(scratch / "one", 0), {"ranks must be 1 or more; got 0"});
  expect_contains(error(scratch / "none", 2), {"/none'"});
  const fs::path file = (scratch / "one") / "rank-00001-of-00002.safetensors";
  std::string text = read_text(file);
  text.back() ^= 1;
  std::ofstream(file, std::ios::binary) << text;
  expect_contains(error(scratch / "one", 3), {file.filename(), "is damaged"});
  EXPECT_EQ(names_in(scratch.path()), Lines{"one"});
}

// --- compare
// ---------------------------------------------------------------------------------------

/// A module and its optimizer, to be saved by this process alone.
struct Subject {
  Subject() : bag(std::make_shared<Bag>()) {
    bag->add("a", torch::ones({2, 3}));
    bag->add("b", torch::ones({4}));
    bag->add_buffer("count", torch::ones({}, torch::kLong));
  }
  void save(const fs::path& path, const SaveOptions& options = {.numbers = {{"step", 1}}}) {
    torch::optim::AdamW adamw(bag->parameters(), torch::optim::AdamWOptions(lr));
    for (int step = 0; step < steps; ++step) {
      for (auto& param : bag->parameters()) param.mutable_grad() = torch::zeros_like(param);
      const auto before = plain_state(*bag);
      adamw.step();
      torch::NoGradGuard no_grad;  // counts the steps and keeps the values
      for (const NamedTensor& item : before) {
        if (auto* param = bag->named_parameters().find(item.name)) param->copy_(item.tensor);
      }
    }
    save_checkpoint(path, *bag, &adamw, options);
  }
  std::shared_ptr<Bag> bag;
  double lr = 0.1;
  int steps = 0;
};

/// Returns the differences between the checkpoints of two Subjects, one of them changed by
/// `change`.
Lines difference_by(const std::function<void(Subject&)>& change,
                    const SaveOptions& options = {.numbers = {{"step", 1}}}) {
  const ScratchDirectory scratch;
  Subject a, b;
  change(b);
  a.save(scratch / "a");
  b.save(scratch / "b", options);
  return compare_checkpoints(scratch / "a", scratch / "b");
}

TEST(CheckpointCompare, FindsEachKindOfDifference) {
  EXPECT_EQ(difference_by([](Subject&) {}), Lines());
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(difference_by([](Subject& b) { b.bag->parameters()[0][1][2] = 1.25; }),
            Lines{"'param/a': 1 of 6 values differ, by at most 0.25"});
  EXPECT_EQ(difference_by([](Subject& b) { b.bag->buffers()[0].fill_(5); }),
            Lines{"'buffer/count': 1 of 1 values differ, by at most 4"});
  EXPECT_EQ(difference_by([](Subject& b) { b.bag->parameters()[1].set_data(torch::ones({5})); }),
            Lines{"'param/b': F32 [4] against F32 [5]"});
  EXPECT_EQ(difference_by([](Subject& b) {
              b.bag->parameters()[1].set_data(torch::ones({2, 2}));
            }),
            Lines{"'param/b': F32 [4] against F32 [2, 2]"});
  EXPECT_EQ(difference_by([](Subject& b) {
              b.bag->parameters()[1].set_data(torch::ones({4}, torch::kBFloat16));
            }),
            Lines{"'param/b': F32 [4] against BF16 [4]"});
  EXPECT_EQ(difference_by([](Subject& b) { b.bag->add_buffer("more", torch::ones({1})); }),
            Lines{"'buffer/more': only B has it"});
  EXPECT_EQ(difference_by([](Subject& b) { b.lr = 0.2; }),
            Lines{"option of param group 0 'lr': 0.1 against 0.2"});
  EXPECT_EQ(difference_by([](Subject&) {}, {.numbers = {{"step", 2}, {"loss", 0.5}}}),
            (Lines{"number 'loss': none against 0.5", "number 'step': 1 against 2"}));
}

TEST(CheckpointCompare, FindsWhatOneLacks) {
  const ScratchDirectory scratch;
  Subject full, fewer;
  full.bag->add("more", torch::ones({1}));
  full.save(scratch / "full");
  fewer.save(scratch / "fewer");
  expect_contains(
      fmt::format("{}", fmt::join(compare_checkpoints(scratch / "full", scratch / "fewer"), "\n")),
      {"'param/more': only A has it", "param group 0 has other parameters"});
  save_checkpoint(scratch / "plain", *fewer.bag, nullptr, {.numbers = {{"step", 1}}});
  EXPECT_EQ(compare_checkpoints(scratch / "fewer", scratch / "plain"),
            Lines{"optimizer: only A has one"});
  EXPECT_EQ(compare_checkpoints(scratch / "plain", scratch / "fewer"),
            Lines{"optimizer: only B has one"});
}

TEST(CheckpointCompare, FindsOtherStepsSchedulersAndScalers) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    Job job(1, plans()[3]);
    torch::optim::StepLR scheduler(job.inner, 3, 0.5);
    const GradScaler scaler;
    save_checkpoint(scratch / "a", job.sharded, &job.optimizer, {.schedulers = {&scheduler}});
    save_checkpoint(scratch / "none", job.sharded, &job.optimizer);
    save_checkpoint(scratch / "scaler", job.sharded, &job.optimizer, {.scaler = &scaler});
    scheduler.step();
    save_checkpoint(scratch / "b", job.sharded, &job.optimizer, {.schedulers = {&scheduler}});
    job.train(0, 1);
    save_checkpoint(scratch / "later", job.sharded, &job.optimizer);
  });
  const auto differences = [&](const char* a, const char* b) {
    return fmt::format("{}", fmt::join(compare_checkpoints(scratch / a, scratch / b), "\n"));
  };
  expect_contains(differences("a", "b"), {"scheduler 0 'step_count': "});
  EXPECT_EQ(differences("a", "none"), "schedulers: 1 against 0");
  expect_contains(differences("none", "scaler"), {"scaler 'scale': none against "});
  expect_contains(differences("none", "later"),
                  {"optimizer steps: 0 against 1", "'param/conv.weight': ",
                   "'state/exp_avg/conv.weight': only B has it", "step counts of 'conv.weight'"});
}

TEST(CheckpointCompare, LooksAtEachNameOfWhatIsTiedInOneOnly) {
  const ScratchDirectory scratch;
  const auto save = [&](const char* name, bool tied) {
    Bag bag;
    const torch::Tensor value = torch::ones({3});
    bag.add("a", value);
    bag.add("b", tied ? value : torch::full({3}, 2.));
    save_checkpoint(scratch / name, bag, nullptr);
  };
  save("tied", true);
  save("loose", false);
  const Lines expected = {"'param/b': 3 of 3 values differ, by at most 1"};
  EXPECT_EQ(compare_checkpoints(scratch / "tied", scratch / "loose"), expected);
  EXPECT_EQ(compare_checkpoints(scratch / "loose", scratch / "tied"), expected);
}

TEST(CheckpointCompare, ComparesBits) {
  const ScratchDirectory scratch;
  const auto save = [&](const char* name, double value) {
    save_state_dict(scratch / name, {{"a", torch::full({2}, value)}});
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  save("nan", nan);
  save("same", nan);
  save("zero", 0.);
  save("negative", -0.);
  EXPECT_EQ(compare_checkpoints(scratch / "nan", scratch / "same"), Lines());
  EXPECT_EQ(compare_checkpoints(scratch / "nan", scratch / "zero").size(), 1u);
  EXPECT_EQ(compare_checkpoints(scratch / "zero", scratch / "negative").size(), 1u);
}

// --- both, and the others
// ----------------------------------------------------------------------------

/// Records the calls of a CheckpointProgress.
struct Told {
  CheckpointProgress progress() {
    return [this](int64_t now, int64_t all) {
      EXPECT_GE(now, done);
      done = now, total = all, calls += 1;
    };
  }
  int64_t done = 0, total = -1;
  int calls = 0;
};

TEST(CheckpointProgress, AscendsToTheTotal) {
  const ScratchDirectory scratch;
  save_in_middle(3, plans()[3], false, scratch / "one");
  save_in_middle(2, plans()[1], false, scratch / "two");
  const std::map<std::string, std::function<void(const CheckpointProgress&)>> works = {
      {"verify", [&](const auto& progress) { verify_checkpoint(scratch / "one", progress); }},
      {"compare",
       [&](const auto& progress) {
         compare_checkpoints(scratch / "one", scratch / "two", progress);
       }},
      // Three ranks have states; only one rank's is rewritten.
      {"reshard",
       [&](const auto& progress) {
         reshard_checkpoint(scratch / "one", scratch / "on1", 1, progress);
       }},
      {"export safetensors",
       [&](const auto& progress) {
         export_checkpoint(scratch / "one", scratch / "a.safetensors", {.progress = progress});
       }},
      {"read",
       [&](const auto& progress) {
         CheckpointTensors tensors(scratch / "one", /*with_state=*/true, {.progress = progress});
         const auto listed = nlohmann::json::parse(tensors.index()).at("tensors");
         for (size_t i = 0; i < listed.size(); ++i) tensors.read(i);
       }},
      {"import", [&](const auto& progress) {
         import_checkpoint(scratch / "a.safetensors", scratch / "imported", {.progress = progress});
       }}};
  const auto run = [&](const std::string& name) {
    Told told;
    works.at(name)(told.progress());
    EXPECT_EQ(told.done, told.total) << name;
    EXPECT_GT(told.total, 1000) << name;
    EXPECT_GT(told.calls, 5) << name;
  };
  for (const auto& [name, work] : works)
    if (name != "import") run(name);
  run("import");  // of the exported file
}

/// Counts the bytes that this thread allocates.
class AllocationCount : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*data*/, int64_t nbytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    now_ += nbytes;
    most_ = std::max(most_, now_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t most() const { return most_; }

 private:
  int64_t now_ = 0, most_ = 0;
};

int64_t most_allocated(const std::function<void()>& work) {
  const auto count = std::make_shared<AllocationCount>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, count);
  work();
  return count->most();
}

/// Copies a checkpoint as a program with a format of its own does.
void write_read_tensors(const fs::path& from, const fs::path& to) {
  CheckpointTensors tensors(from, /*with_state=*/true);
  import_tensors(
      tensors.index(), [&](size_t number) { return tensors.read(number); }, to);
}

TEST(CheckpointTensors, AreThoseThatWereSaved) {
  const ScratchDirectory scratch;
  save_in_middle(3, plans()[3], false, scratch / "one");
  write_read_tensors(scratch / "one", scratch / "copy");
  Lines differences = compare_checkpoints(scratch / "one", scratch / "copy");
  std::erase_if(differences, [](const auto& line) { return line.starts_with("number"); });
  EXPECT_EQ(differences, Lines());
  const auto copy = [&](const std::string& part, const std::string& other) {
    CheckpointTensors tensors(scratch / "one", /*with_state=*/true);
    std::string index = tensors.index();
    index = nlohmann::json::parse(index).dump();  // without its checksum's place
    index.replace(index.find(part), part.size(), other);
    return error_of([&] {
      import_tensors(
          index, [&](size_t number) { return tensors.read(number); }, scratch / "two");
    });
  };
  expect_contains(copy("\"F32\"", "\"F64\""),
                  {"[import_tensors] '", "elements of F64, as the index"});
  expect_contains(copy("\"tensors\"", "\"other\""), {"'index' can't be read"});
  EXPECT_FALSE(fs::exists(scratch / "two"));
}

TEST(CheckpointMemory, IsOfATensorOrTwo) {
  const ScratchDirectory scratch;
  constexpr int64_t kBytes = 400'000;
  StateDict state;
  for (int i = 0; i < 16; ++i) state[fmt::format("a{}", i)] = torch::full({kBytes / 4}, 1. * i);
  save_state_dict(scratch / "one", state);
  write_torch_state(scratch / "one.pt", {state.begin(), state.end()});
  const std::map<std::string, std::function<void()>> works = {
      {"1", [&] { write_read_tensors(scratch / "one", scratch / "copy"); }},
      {"2", [&] { export_checkpoint(scratch / "one", scratch / "one.safetensors"); }},
      {"3", [&] { import_checkpoint(scratch / "one.pt", scratch / "two"); }},
      {"4", [&] { import_checkpoint(scratch / "one.safetensors", scratch / "two"); }},
      {"5", [&] { reshard_checkpoint(scratch / "one", scratch / "three", 3); }},
      {"6", [&] { compare_checkpoints(scratch / "one", scratch / "two"); }}};
  for (const auto& [name, work] : works) {
    const int64_t most = most_allocated(work);
    EXPECT_GT(most, kBytes / 4) << name;  // otherwise nothing was counted
    EXPECT_LT(most, 3 * kBytes) << name;
  }
}

}  // namespace tessera::testing::convert_test
