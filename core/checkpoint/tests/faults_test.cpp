// Damaged checkpoints, and places that can't be written to: every rank reports the error.
#include <fmt/ranges.h>
#include <sched.h>
#include <sys/mount.h>

#include <mutex>
#include <optional>
#include <thread>

#include "checkpoint/checksum.h"
#include "checkpoint/directory.h"
#include "checkpoint/tests/saved_job.h"

namespace tessera::testing::faults_test {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// A file whose changes last as long as the object.
class Changed {
 public:
  explicit Changed(fs::path path) : path_(std::move(path)), whole_(read_text(path_)) {}
  ~Changed() { write_text(path_, whole_); }
  Changed(const Changed&) = delete;
  Changed& operator=(const Changed&) = delete;

  const std::string& whole() const { return whole_; }
  void set(const std::string& text) const { write_text(path_, text); }
  void flip(size_t byte, int bit = 0) const {
    std::string text = whole_;
    text.at(byte) = static_cast<char>(text.at(byte) ^ (1 << bit));
    set(text);
  }

 private:
  fs::path path_;
  std::string whole_;
};

/// A checkpoint to be damaged, and a copy that stays whole.
class CheckpointFaults : public ::testing::TestWithParam<bool> {
 protected:
  CheckpointFaults()
      : one_(scratch_ / "one"),
        copy_(scratch_ / "copy"),
        saved_(save_in_middle(2, plans()[3], GetParam(), one_)) {
    fs::copy(one_, copy_);
  }

  Lines data_files() const {
    Lines files = names_in(one_);
    std::erase(files, "index.json");
    return files;
  }

  /// Loads the checkpoint on two ranks and on three. Each rank must throw an error that contains
  /// all of `parts`, and can load the copy afterwards.
  void expect_refused(const Lines& parts, bool unchanged = true) {
    for (const int ranks : {2, 3}) {
      run_world(ranks, [&](World& world) {
        SCOPED_TRACE(fmt::format("rank {} of {}", world.rank(), ranks));
        Job job(2, plans()[3]);
        const auto before = job.sharded.full_state();
        const std::string error =
            error_of([&] { load_checkpoint(one_, job.sharded, &job.optimizer); });
        expect_contains(error, parts);
        EXPECT_NE(error, "");
        if (unchanged) {
          expect_same_state(job.sharded.full_state(), before, 0, "after the error");
          EXPECT_TRUE(job.inner.state().empty());
        }
        load_checkpoint(copy_, job.sharded, &job.optimizer);
        expect_same_state(job.sharded.full_state(), saved_.state, 0, "the copy");
      });
    }
  }

  /// Loads on three ranks: either all throw an error that contains `part`, or all have the right
  /// values. Returns whether they threw.
  bool is_refused_or_right(const std::string& part) {
    int refused = 0;
    std::mutex mutex;
    run_world(3, [&](World&) {
      Job job(2, plans()[3]);
      const std::string error =
          error_of([&] { load_checkpoint(one_, job.sharded, &job.optimizer); });
      if (error.empty()) {
        expect_same_state(job.sharded.full_state(), saved_.state, 0, "not refused");
      } else {
        expect_contains(error, {part});
      }
      const std::lock_guard lock(mutex);
      refused += error.empty() ? 0 : 1;
    });
    EXPECT_TRUE(refused == 0 || refused == 3) << refused;
    return refused == 3;
  }

  ScratchDirectory scratch_;
  fs::path one_, copy_;
  Saved saved_;
};

INSTANTIATE_TEST_SUITE_P(Whole, CheckpointFaults, ::testing::Bool());

size_t begin_of_data(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  return 8 + length;
}

TEST_P(CheckpointFaults, AFlippedBitOfTheDataOfAnyFileIsFound) {
  for (const std::string& name : data_files()) {
    SCOPED_TRACE(name);
    const Changed file(one_ / name);
    const size_t begin = begin_of_data(file.whole()), end = file.whole().size();
    for (const size_t byte : {begin, begin + (end - begin) / 3, (begin + end) / 2, end - 1}) {
      file.flip(byte, static_cast<int>(byte % 8));
      expect_refused({(one_ / name).string(), "is damaged: bytes "}, /*unchanged=*/false);
      const Lines damage = verify_checkpoint(one_);
      ASSERT_EQ(damage.size(), 1u);
      expect_contains(damage[0], {(one_ / name).string(), "is damaged: bytes "});
    }
  }
  EXPECT_EQ(data_files().size(), GetParam() ? 4u : 2u);
}

// Only a header bit without meaning (in the letters of "format") may change unnoticed.
TEST_P(CheckpointFaults, AFlippedBitOfAHeaderGivesAnErrorOrTheRightValues) {
  for (const std::string& name : data_files()) {
    SCOPED_TRACE(name);
    const Changed file(one_ / name);
    const size_t end = begin_of_data(file.whole());
    int tried = 0, refused = 0;
    for (size_t byte = 0; byte < end; byte += byte < 9 ? 3 : end / 6 + 1, ++tried) {
      file.flip(byte, static_cast<int>(byte % 7));
      refused += is_refused_or_right((one_ / name).string()) ? 1 : 0;
    }
    EXPECT_GE(refused, tried - 2);
  }
}

TEST_P(CheckpointFaults, AFlippedBitOfTheIndexIsFoundByItsChecksum) {
  const Changed index(one_ / "index.json");
  const size_t size = index.whole().size();
  for (const size_t byte : {size_t{20}, size / 4, size / 2, 3 * size / 4, size - 3}) {
    index.flip(byte);
    expect_refused({(one_ / "index.json").string(), "is damaged or was changed"});
  }
  index.flip(0);
  expect_refused({(one_ / "index.json").string()});
  const Lines damage = verify_checkpoint(one_);
  ASSERT_EQ(damage.size(), 1u);
  expect_contains(damage[0], {(one_ / "index.json").string()});
}

TEST_P(CheckpointFaults, TruncatedFilesAreRefusedBeforeAnythingChanges) {
  for (const std::string& name : data_files()) {
    SCOPED_TRACE(name);
    const Changed file(one_ / name);
    const size_t begin = begin_of_data(file.whole());
    for (const size_t size : {size_t{0}, size_t{7}, begin / 2, begin, file.whole().size() - 1}) {
      file.set(file.whole().substr(0, size));
      expect_refused({(one_ / name).string(), size < 8       ? "must be a safetensors file"
                                              : size < begin ? ""
                                                             : "is cut off"});
    }
  }
  const Changed index(one_ / "index.json");
  for (const size_t size : {size_t{0}, index.whole().size() / 2, index.whole().size() - 2}) {
    index.set(index.whole().substr(0, size));
    expect_refused({(one_ / "index.json").string()});
  }
}

TEST_P(CheckpointFaults, MissingFilesAreNamed) {
  for (const std::string& name : names_in(one_)) {
    SCOPED_TRACE(name);
    const Changed file(one_ / name);
    fs::remove(one_ / name);
    expect_refused({(one_ / name).string(), "No such file"});
  }
  fs::remove_all(one_);
  expect_refused({"could not open the directory"});
}

TEST_P(CheckpointFaults, FilesOfAnotherSaveAreNamed) {
  save_in_middle(2, plans()[3], GetParam(), scratch_ / "other");
  for (const std::string& name : data_files()) {
    SCOPED_TRACE(name);
    const Changed file(one_ / name);
    file.set(read_text((scratch_ / "other") / name));
    expect_refused({(one_ / name).string(), "is of another save than the index"});
  }
}

TEST_P(CheckpointFaults, LaterFormatVersionsAskForANewerTessera) {
  const Changed index(one_ / "index.json");
  nlohmann::json later = nlohmann::json::parse(index.whole());
  later.erase("checksum");
  later["format_version"] = 3;
  later["tessera_version"] = "9.1.0";
  index.set(later.dump());
  expect_refused({(one_ / "index.json").string(), "format version 3", "written by tessera 9.1.0",
                  "newer tessera"});
  later["format_version"] = 1;
  index.set(later.dump());
  expect_refused({(one_ / "index.json").string(), "format version 1; expected 2"});
  later["format_version"] = 2;  // edited by hand, but valid
  index.set(later.dump());
  run_world(2, [&](World&) {
    Job job(2, plans()[3]);
    load_checkpoint(one_, job.sharded, &job.optimizer);
    expect_same_state(job.sharded.full_state(), saved_.state, 0, "edited by hand");
  });
}

TEST_P(CheckpointFaults, VerifyNamesEachDamagedPiece) {
  EXPECT_EQ(verify_checkpoint(one_), Lines());
  const Lines files = data_files();
  const Changed first(one_ / files.front()), last(one_ / files.back());
  first.flip(begin_of_data(first.whole()));
  last.flip(begin_of_data(last.whole()));
  Lines damage = verify_checkpoint(one_);
  ASSERT_EQ(damage.size(), 2u);
  std::sort(damage.begin(), damage.end());
  expect_contains(damage[0], {files.front(), "is damaged: bytes 0 to "});
  expect_contains(damage[1], {files.back(), "is damaged: bytes 0 to "});
  // A missing file is reported once, not for each piece.
  fs::remove(one_ / files.back());
  damage = verify_checkpoint(one_);
  ASSERT_EQ(damage.size(), 2u);
  std::sort(damage.begin(), damage.end(), [](const auto& a, const auto& b) {
    return a.find("is damaged") < b.find("is damaged");
  });
  expect_contains(damage[0], {files.front(), "is damaged: bytes 0 to "});
  expect_contains(damage[1], {(one_ / files.back()).string(), "No such file"});
}

// A tensor of several blocks: the damaged block is named, and the others are read without it.
TEST(CheckpointBlocks, OnlyTheRanksThatNeedADamagedBlockFindItAndAllHearOfIt) {
  const ScratchDirectory scratch;
  const int64_t numel = 4 * kChecksumBlock / 4;  // four blocks of float32
  save_state_dict(scratch / "one", {{"a", torch::arange(numel).to(torch::kFloat)}});
  const fs::path file = (scratch / "one") / "rank-00000-of-00001.safetensors";
  const Changed changed(file);
  const size_t begin = begin_of_data(changed.whole());
  for (const int64_t block : {0, 3}) {
    changed.flip(begin + static_cast<size_t>(block * kChecksumBlock + 77));
    const std::string bytes = fmt::format("bytes {} to {} of 'tensor/a/0'", block * kChecksumBlock,
                                          (block + 1) * kChecksumBlock - 1);
    expect_contains(fmt::format("{}", fmt::join(verify_checkpoint(scratch / "one"), "\n")),
                    {file.string(), bytes});
    run_world(2, [&](World& world) {
      const auto mesh = DeviceMesh::over_world(world);
      const torch::Tensor a = distribute(torch::zeros({numel}, test_device()), mesh, {Shard{0}});
      const std::string error = error_of([&] { load_state_dict(scratch / "one", {{"a", a}}); });
      expect_contains(error, {file.string(), bytes});
      const int finder = block == 0 ? 0 : 1;
      if (world.rank() != finder) {
        expect_contains(error, {fmt::format("(on rank {} of 2)", finder)});
      }
    });
  }
}

// --- saves
// -----------------------------------------------------------------------------------------

TEST(CheckpointPlaces, ASecondSaveToADirectoryIsRefusedAndTheFirstOneIsWhole) {
  const ScratchDirectory scratch;
  for (const bool replaces : {false, true}) {
    run_world(2, [&](World& world) {
      Filled first(1), second(2);
      if (replaces) save_checkpoint(scratch / "one", *Filled(0).sharded, nullptr);
      // Slow enough to be under way when the second save starts.
      AsyncCheckpointer checkpointer({.bytes_per_second = world.rank() == 0 ? 1'500. : 3'000.});
      checkpointer.save(scratch / "one", *first.sharded, nullptr);
      for (const bool whole : {false, true}) {
        expect_contains(error_of([&] {
                          save_checkpoint(scratch / "one", *second.sharded, nullptr,
                                          {.whole_parameters = whole});
                        }),
                        {"another save to '" + (scratch / "one").string(), "is under way"});
      }
      EXPECT_TRUE(world.rank() == 1 || checkpointer.is_busy()) << "was too fast for this test";
      checkpointer.wait();
      expect_holds(scratch / "one", 1);
      save_checkpoint(scratch / "one", *second.sharded, nullptr);  // now it is allowed
      expect_holds(scratch / "one", 2);
    });
    EXPECT_EQ(verify_checkpoint(scratch / "one"), Lines());
    EXPECT_EQ(names_in(scratch.path()), Lines{"one"});
  }
}

TEST(CheckpointPlaces, AnotherJobsDraftIsLeftAlone) {
  const ScratchDirectory scratch;
  CheckpointDirectory other(scratch / "one");
  other.prepare();
  const std::string name = "rank-00000-of-00001.safetensors";
  write_text(other.draft() / name, "being written");
  run_world(2, [&](World&) {
    Filled model(1);
    expect_contains(error_of([&] { save_checkpoint(scratch / "one", *model.sharded, nullptr); }),
                    {"another save", "is under way"});
  });
  EXPECT_EQ(read_text(other.draft() / name), "being written");
  other.discard();
  EXPECT_EQ(names_in(scratch.path()), Lines());
}

TEST(CheckpointPlaces, APathIsFreeAgainAfterAReplacement) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) { save_checkpoint(scratch / "one", *Filled(1).sharded, nullptr); });
  CheckpointDirectory first(scratch / "one"), second(scratch / "one");
  first.prepare();
  write_text(first.draft() / "index.json", "new");
  first.publish();
  second.prepare();
  EXPECT_TRUE(fs::is_empty(second.draft()));
  EXPECT_EQ(read_text((scratch / "one") / "index.json"), "new");
  second.discard();
}

TEST(CheckpointPlaces, WhatCantBeWrittenIsAnErrorOnEveryRank) {
  const ScratchDirectory scratch;
  write_text(scratch / "file", "text");
  // A place where not even root can make a directory.
  const fs::path nowhere = "/proc/tessera-test";
  run_world(3, [&](World&) {
    Filled model(1);
    AsyncCheckpointer checkpointer;
    for (const fs::path& path :
         {nowhere, nowhere / "deep", scratch / "file", scratch / "file/one"}) {
      const std::string named =
          path == scratch / "file/one" ? (scratch / "file").string() : path.string();
      for (const bool whole : {false, true}) {
        expect_contains(error_of([&] {
                          save_checkpoint(path, *model.sharded, nullptr,
                                          {.whole_parameters = whole});
                        }),
                        {named});
      }
      expect_contains(error_of([&] { save_state_dict(path, {{"a", torch::ones({2})}}); }), {named});
      expect_contains(error_of([&] { checkpointer.save(path, *model.sharded, nullptr); }), {named});
    }
    save_checkpoint(scratch / "one", *model.sharded, nullptr);  // the ranks are still in step
    expect_holds(scratch / "one", 1);
  });
  EXPECT_EQ(read_text(scratch / "file"), "text");
  EXPECT_EQ(names_in(scratch.path()), (Lines{"file", "one"}));
}

// Such a directory can't be renamed, though it is on the file system of its parent.
TEST(CheckpointPlaces, ADirectoryThatIsMountedFromItsOwnFileSystemIsWrittenInside) {
  const ScratchDirectory scratch;
  const fs::path mounted = scratch / "mounted";
  fs::create_directory(mounted);
  EXPECT_EQ(CheckpointDirectory(mounted).draft(), scratch / "mounted.tmp");
  std::optional<fs::path> draft;
  // The thread has mounts of its own, which end with it.
  std::thread([&] {
    const bool may_mount =
        ::unshare(CLONE_NEWNS) == 0 &&
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
        ::mount(mounted.c_str(), mounted.c_str(), nullptr, MS_BIND, nullptr) == 0;
    if (may_mount) draft = CheckpointDirectory(mounted).draft();
  }).join();
  if (!draft) GTEST_SKIP() << "this process may not mount anything";
  EXPECT_EQ(*draft, mounted / "checkpoint.tmp");
}

}  // namespace tessera::testing::faults_test
