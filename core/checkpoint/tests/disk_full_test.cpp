#include "checkpoint/tests/saved_model.h"
#include "support/file_size_limit.h"

namespace tessera::testing::disk_full_test {

namespace fs = std::filesystem;

// Returns the error of each rank that saves while no file can grow beyond `nbytes`.
std::vector<std::string> errors_of(int ranks, rlim_t nbytes, const std::function<void()>& save) {
  std::vector<std::string> errors(ranks);
  const FileSizeLimit limit(nbytes);
  run_world(ranks, [&](World& world) { errors[world.rank()] = error_of(save); });
  return errors;
}

TEST(CheckpointDiskFull, FailsOnEveryRankAndKeepsTheOldCheckpoint) {
  const ScratchDirectory scratch;
  const fs::path one = scratch / "one";
  for (const bool whole : {false, true}) {
    const SaveOptions options{.whole_parameters = whole};
    run_world(2, [&](World&) { save_checkpoint(one, *Filled(1).sharded, nullptr, options); });
    uintmax_t most = 0;
    for (const auto& entry : fs::directory_iterator(one)) most = std::max(most, entry.file_size());
    for (const double share : {0., 0.1, 0.4, 0.7, 0.95}) {
      for (const std::string& error :
           errors_of(2, static_cast<rlim_t>(share * static_cast<double>(most)),
                     [&] { save_checkpoint(one, *Filled(2).sharded, nullptr, options); })) {
        expect_contains(error, {"could not write", (scratch / "one.tmp").string(), "too large"});
      }
      run_world(2, [&](World&) { expect_holds(one, 1); });
      EXPECT_EQ(names_in(scratch / ""), std::vector<std::string>{"one"});
    }
  }
}

TEST(CheckpointDiskFull, OnOneRankAloneDoesNotStopTheGathersOfTheOthers) {
  const ScratchDirectory scratch;
  const auto save = [&] {
    auto bag = std::make_shared<Bag>();
    for (const char* name : {"a", "c", "d", "e", "f"}) {
      bag->add(name, torch::ones({5}));
      if (name[0] == 'a') bag->add("b", torch::ones({50, 100}));  // the unit of rank 1
    }
    auto sharded = fully_shard(on_test_device(bag), {.unit_bytes = 0});
    save_checkpoint(scratch / "one", sharded, nullptr,
                    {.whole_parameters = true, .random_state = false});
  };
  for (const std::string& error : errors_of(3, 10'000, save)) {
    expect_contains(error,
                    {"could not write", "one.tmp/model-00002-of-00003.safetensors", "too large"});
  }
  EXPECT_TRUE(names_in(scratch / "").empty());
  run_world(3, [&](World&) { save(); });
  EXPECT_EQ(names_in(scratch / "one").size(), 4u);
}

}  // namespace tessera::testing::disk_full_test
