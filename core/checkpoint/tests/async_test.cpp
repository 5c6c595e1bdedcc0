// Saves that run while training continues.
#include <thread>

#include "checkpoint/tests/saved_job.h"
#include "support/file_size_limit.h"

namespace tessera::testing::async_test {

namespace fs = std::filesystem;

TEST(AsyncCheckpoint, HoldsWhatWasThereWhenItWasAskedFor) {
  const ScratchDirectory scratch;
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World&) {
      Job job(1, plans()[3]);
      job.train(0, 2);
      save_checkpoint(scratch / "plain", job.sharded, &job.optimizer);
      AsyncCheckpointer checkpointer;
      checkpointer.save(scratch / "async", job.sharded, &job.optimizer);
      job.train(2, 6);  // changes all of it meanwhile
      checkpointer.wait();
      checkpointer.wait();  // nothing to wait for
      EXPECT_FALSE(checkpointer.is_busy());
    });
    EXPECT_EQ(compare_checkpoints(scratch / "plain", scratch / "async"),
              std::vector<std::string>());
    EXPECT_EQ(verify_checkpoint(scratch / "async"), std::vector<std::string>());
  }
}

TEST(AsyncCheckpoint, ALaterSaveWaitsOrIsRefusedOnAllRanks) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    Filled model(1);
    const int64_t bytes = 8 * 2;
    // One rank is slow: a block takes it a good part of a second.
    AsyncCheckpointer waits({.bytes_per_second = world.rank() == 1 ? bytes * 200. : 0});
    waits.save(scratch / "one", *model.sharded, nullptr);
    waits.save(scratch / "two", *model.sharded, nullptr);
    expect_holds(scratch / "one", 1);
    waits.wait();
    expect_holds(scratch / "two", 1);
    AsyncCheckpointer refuses(
        {.when_busy = WhenBusy::kRefuse, .bytes_per_second = world.rank() == 1 ? bytes * 200. : 0});
    refuses.save(scratch / "three", *model.sharded, nullptr);
    expect_contains(error_of([&] { refuses.save(scratch / "four", *model.sharded, nullptr); }),
                    {"of 2 is still writing", "WhenBusy::kWait"});
    refuses.wait();
    expect_holds(scratch / "three", 1);
  });
  EXPECT_FALSE(fs::exists(scratch / "four"));
}

TEST(AsyncCheckpoint, ComesToItsPlaceEvenIfNobodyAsks) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    Filled model(3);
    AsyncCheckpointer checkpointer;
    checkpointer.save(scratch / "one", *model.sharded, nullptr);
  });
  run_world(2, [&](World&) { expect_holds(scratch / "one", 3); });
}

TEST(AsyncCheckpoint, AnErrorComesWithTheNextCallOnEveryRankAndNothingIsLost) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    Filled model(1);
    save_checkpoint(scratch / "one", *model.sharded, nullptr);
    AsyncCheckpointer checkpointer;
    const auto fail = [&] {
      world.process_group()->barrier({"test"});
      std::optional<FileSizeLimit> limit;
      if (world.rank() == 0) limit.emplace(200);
      world.process_group()->barrier({"test"});
      checkpointer.save(scratch / "one", *Filled(2).sharded, nullptr);
      while (checkpointer.is_busy()) std::this_thread::yield();
      world.process_group()->barrier({"test"});
    };
    fail();
    expect_contains(error_of([&] { checkpointer.wait(); }), {"could not write", "one.tmp/rank-"});
    expect_holds(scratch / "one", 1);
    fail();
    expect_contains(
        error_of([&] { checkpointer.save(scratch / "one", *Filled(3).sharded, nullptr); }),
        {"could not write", "one.tmp/rank-"});
    expect_holds(scratch / "one", 1);
    checkpointer.save(scratch / "one", *Filled(3).sharded, nullptr);
    checkpointer.wait();
    expect_holds(scratch / "one", 3);
  });
  EXPECT_EQ(names_in(scratch / ""), std::vector<std::string>{"one"});
}

// Rank 0 publishes the checkpoint, and waits for the part of the other.
TEST(AsyncCheckpoint, AnErrorOfAnotherRankEndsTheWaitForItsPart) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    const auto module = on_test_device(std::make_shared<torch::nn::LinearImpl>(100, 3));
    auto sharded = fully_shard(
        module, {.partition = Partition::kWholeParam, .owners = {{"weight", 1}, {"bias", 0}}});
    AsyncCheckpointer checkpointer;
    std::optional<FileSizeLimit> limit;
    if (world.rank() == 0) limit.emplace(1000);
    world.process_group()->barrier({"test"});
    checkpointer.save(scratch / "one", sharded, nullptr);
    if (world.rank() == 1) {
      while (checkpointer.is_busy()) std::this_thread::yield();
    } else {
      EXPECT_TRUE(checkpointer.is_busy());
    }
    expect_contains(error_of([&] { checkpointer.wait(); }), {"could not write", "one.tmp/rank-"});
  });
  EXPECT_EQ(names_in(scratch / ""), std::vector<std::string>());
}

TEST(AsyncCheckpoint, AnErrorThatNobodyAskedForIsPrinted) {
  const ScratchDirectory scratch;
  ::testing::internal::CaptureStderr();
  run_world(1, [&](World&) {
    Filled model(1);
    const FileSizeLimit limit(200);
    AsyncCheckpointer checkpointer;
    checkpointer.save(scratch / "one", *model.sharded, nullptr);
  });
  expect_contains(::testing::internal::GetCapturedStderr(),
                  {"AsyncCheckpointer: ", "could not write"});
}

TEST(AsyncCheckpoint, WholeParametersAreRefusedOnAllRanksWithTheWayOut) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    Filled model(1);
    auto plain = on_test_device(std::make_shared<torch::nn::LinearImpl>(2, 2));
    AsyncCheckpointer checkpointer;
    const auto error_with = [&](bool whole) {
      return error_of([&] {
        checkpointer.save(scratch / "one", *model.sharded, nullptr, {.whole_parameters = whole});
      });
    };
    expect_contains(error_with(true), {"export_checkpoint()"});
    expect_contains(error_with(world.rank() == 1), {"must be the same on all ranks"});
    // A module that is not sharded has nothing to gather; the others' errors name the rank that
    // asked.
    expect_contains(error_of([&] {
                      checkpointer.save(scratch / "one", *plain, nullptr,
                                        {.whole_parameters = world.rank() == 1});
                    }),
                    {world.rank() == 0 ? "rank 1" : "save_checkpoint", "export_checkpoint()"});
    checkpointer.save(scratch / "one", *model.sharded, nullptr);  // the ranks are still in step
  });
}

TEST(CheckpointSeries, KeepsTheNewestAndFindsTheLatest) {
  const ScratchDirectory scratch;
  EXPECT_FALSE(latest_checkpoint(scratch / "none"));
  EXPECT_FALSE(latest_checkpoint(scratch / ""));
  run_world(2, [&](World&) {
    Filled model(1);
    AsyncCheckpointer checkpointer;
    for (const int step : {8, 9, 10, 11}) {
      const auto path = scratch / fmt::format("step-{}", step);
      if (step % 2 == 0) {
        save_checkpoint(path, *model.sharded, nullptr, {.keep_last = 2});
      } else {
        checkpointer.save(path, *model.sharded, nullptr, {.keep_last = 2});
        checkpointer.wait();
      }
    }
    save_checkpoint(scratch / "other-3", *model.sharded, nullptr, {.keep_last = 1});
    expect_contains(error_of([&] {
                      save_checkpoint(scratch / "x", *model.sharded, nullptr, {.keep_last = -1});
                    }),
                    {"keep_last"});
  });
  EXPECT_EQ(names_in(scratch / ""), (std::vector<std::string>{"other-3", "step-10", "step-11"}));
  EXPECT_EQ(latest_checkpoint(scratch / ""), scratch / "step-11");
  // An interrupted removal, a draft and an unrelated directory are no checkpoints.
  fs::remove(scratch / "step-11" / "index.json");
  fs::create_directory(scratch / "step-12.tmp");
  fs::create_directory(scratch / "notes-99");
  EXPECT_EQ(latest_checkpoint(scratch / ""), scratch / "step-10");
  // An interrupted replacement is read under its own name.
  fs::rename(scratch / "step-10", scratch / "step-10.old");
  EXPECT_EQ(latest_checkpoint(scratch / ""), scratch / "step-10");
  run_world(2, [&](World&) { expect_holds(scratch / "step-10", 1); });
}

}  // namespace tessera::testing::async_test
