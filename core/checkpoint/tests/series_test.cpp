// Numbered checkpoints: which ones are removed, and the leftovers of killed saves.
#include <fmt/format.h>

#include <future>

#include "checkpoint/directory.h"
#include "checkpoint/tests/saved_model.h"
#include "support/error_of.h"

namespace tessera::testing::series_test {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

void write_text(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

void save(const fs::path& path, int keep_last) {
  save_checkpoint(path, *make_picture(1), nullptr, {.keep_last = keep_last});
}

TEST(CheckpointSeries, KeepLastRemovesOnlyWhatARunNumbered) {
  const ScratchDirectory scratch;
  // Another tool's model, a resharded checkpoint, one saved outside of the series, one that a run
  // had numbered and a user has renamed, and a copy.
  fs::create_directories(scratch / "llama-1");
  write_text(scratch / "llama-1" / "model-00001-of-00001.safetensors", "values");
  write_text(scratch / "llama-1" / "config.json", "{}");
  save(scratch / "llama-2", 0);
  save(scratch / "step-7", 1);
  fs::copy(scratch / "step-7", scratch / "llama-3");
  fs::rename(scratch / "step-7", scratch / "llama-4");
  reshard_checkpoint(scratch / "llama-4", scratch / "llama-5", 1);
  fs::create_directories(scratch / "llama-6");  // from an old removal, or unrelated
  write_text(scratch / "llama-6" / "rank-00000-of-00001.safetensors", "values");
  Lines before = names_in(scratch.path());
  EXPECT_EQ(before, (Lines{"llama-1", "llama-2", "llama-3", "llama-4", "llama-5", "llama-6"}));
  for (const int number : {10, 11, 12}) save(scratch / fmt::format("llama-{}", number), 2);
  before.insert(before.begin() + 1, {"llama-11", "llama-12"});
  EXPECT_EQ(names_in(scratch.path()), before);
  EXPECT_EQ(names_in(scratch / "llama-1").size(), 2u);
  EXPECT_EQ(names_in(scratch / "llama-6").size(), 1u);
  for (const char* name : {"llama-2", "llama-3", "llama-4", "llama-5", "llama-11"})
    EXPECT_EQ(verify_checkpoint(scratch / name), Lines()) << name;
}

TEST(CheckpointSeries, ARemovalThatWasCutOffIsFinishedByTheNext) {
  const ScratchDirectory scratch;
  fs::create_directories(scratch / "step-1.removed");
  write_text(scratch / "step-1.removed" / "rank-00000-of-00001.safetensors", "some");
  fs::create_directories(scratch / "step-2.removed");
  write_text(scratch / "step-2.removed" / "notes.txt", "mine");
  fs::create_directories(scratch / "other-1.removed");
  save(scratch / "step-3", 1);
  EXPECT_EQ(names_in(scratch.path()), (Lines{"other-1.removed", "step-2.removed", "step-3"}));
}

TEST(CheckpointSeries, DraftsOfKilledSavesAreRemovedByTheNextSave) {
  const ScratchDirectory scratch;
  const auto make_draft = [&](const char* name, const char* file) {
    fs::create_directories(scratch / name);
    write_text(scratch / name / file, "some");
  };
  make_draft("step-100.tmp", "rank-00000-of-00002.safetensors");
  make_draft("step-90.tmp", "rank-00000-of-00002.part.json");
  make_draft("step-80.tmp", "notes.txt");
  make_draft("other-1.tmp", "rank-00000-of-00002.safetensors");
  make_draft("step-x.tmp", "rank-00000-of-00002.safetensors");
  CheckpointDirectory other(scratch / "step-70");  // a save that is under way
  other.prepare();
  save(scratch / "step-150", 0);
  EXPECT_EQ(names_in(scratch.path()),
            (Lines{"other-1.tmp", "step-150", "step-70.tmp", "step-80.tmp", "step-x.tmp"}));
  other.discard();
  // A save that is not of a series leaves all other drafts alone.
  make_draft("step-100.tmp", "rank-00000-of-00002.safetensors");
  save(scratch / "best", 0);
  EXPECT_TRUE(fs::exists(scratch / "step-100.tmp"));
}

// As replicas do that save `step-100-0`, `step-100-1`, ... together.
TEST(CheckpointSeries, SavesOfOneSeriesMayBeginAtOnce) {
  const ScratchDirectory scratch;
  const auto save_often = [&](int number) {
    for (int i = 0; i < 300; ++i) {
      CheckpointDirectory directory(scratch / ("step-" + std::to_string(number)));
      directory.prepare();
      write_text(directory.draft() / "rank-00000-of-00001.safetensors", "some");
      remove_abandoned_drafts(directory.path());
      EXPECT_TRUE(fs::exists(directory.draft() / "rank-00000-of-00001.safetensors"));
      directory.discard();
    }
  };
  std::vector<std::future<void>> saves;
  for (int number = 1; number <= 4; ++number)
    saves.push_back(std::async(std::launch::async, save_often, number));
  for (auto& save : saves) EXPECT_NO_THROW(save.get());
  EXPECT_EQ(names_in(scratch.path()), Lines());
}

TEST(CheckpointSeries, AreListedWithWhatIsWrong) {
  const ScratchDirectory scratch;
  const fs::path one = scratch / "one", two = scratch / "two";
  for (const char* const name : {"step-10", "step-9"}) save(one / name, 0);
  save(two / "deep" / "step-4", 0);
  fs::remove(two / "deep" / "step-4" / "rank-00000-of-00001.safetensors");
  save(two / "best", 0);
  fs::rename(two / "best", two / "best.old");  // its replacement was interrupted
  fs::copy(one / "step-9", one / "step-12.tmp");
  write_text(two / "step-5", "a file");
  fs::create_directory_symlink(one / "loop-99", one / "loop-99");
  fs::create_directory_symlink(scratch / "none", one / "gone-100");
  fs::create_directory_symlink(scratch.path(), two / "up");  // not followed
  fs::create_directory_symlink(one / "step-9", two / "linked");
  EXPECT_EQ(latest_checkpoint(one), one / "step-10");
  std::vector<std::pair<fs::path, bool>> found;
  for (const ListedCheckpoint& listed : list_checkpoints(scratch.path())) {
    found.emplace_back(listed.path, listed.is_latest);
    const bool is_whole = listed.path.filename() != "step-4";
    EXPECT_EQ(listed.problem.empty(), is_whole) << listed.problem;
    EXPECT_NE(listed.summary.id, "");
    if (!is_whole) expect_contains(listed.problem, {"step-4/rank-00000-of-00001.safetensors"});
  }
  EXPECT_EQ(found, (std::vector<std::pair<fs::path, bool>>{{one / "step-9", false},
                                                           {one / "step-10", true},
                                                           {two / "best", false},
                                                           {two / "linked", false},
                                                           {two / "deep" / "step-4", true}}));
  EXPECT_EQ(list_checkpoints(one / "step-9").size(), 1u);
  expect_contains(error_of([&] { list_checkpoints(two / "step-5"); }), {"must be a directory"});
}

}  // namespace tessera::testing::series_test
