#include <fmt/format.h>
#include <tessera/comm/fake_world.h>

#include "checkpoint/tests/saved_model.h"
#include "engine/model/sharded_state.h"

namespace tessera::testing::files_test {

namespace fs = std::filesystem;

TEST(CheckpointFiles, FollowTheSafetensorsFormat) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    auto picture = make_picture(1);
    picture->norm->weight.set_data(picture->norm->weight.detach().to(torch::kBFloat16));
    auto sharded = fully_shard(picture);
    save_checkpoint(scratch / "one", sharded, nullptr);
  });
  EXPECT_EQ(names_in(scratch / "one"),
            (std::vector<std::string>{"index.json", "rank-00000-of-00002.safetensors",
                                      "rank-00001-of-00002.safetensors"}));
  const std::map<std::string, int64_t> item_bytes = {
      {"F32", 4}, {"I64", 8}, {"BF16", 2}, {"U8", 1}};
  for (const char* name : {"rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"}) {
    const std::string text = read_text(scratch / "one" / name);
    uint64_t length = 0;
    std::memcpy(&length, text.data(), 8);
    EXPECT_EQ(length % 8, 0u);
    EXPECT_EQ(text[8], '{');
    const ParsedFile file = parse_safetensors(scratch / "one" / name);
    std::map<int64_t, int64_t> ranges;
    for (const auto& [key, value] : file.header.items()) {
      if (key == "__metadata__") {
        for (const auto& item : value) EXPECT_TRUE(item.is_string());
        continue;
      }
      const int64_t begin = value.at("data_offsets").at(0), end = value.at("data_offsets").at(1);
      const int64_t item = item_bytes.at(value.at("dtype"));
      ASSERT_EQ(value.at("shape").size(), 1u);
      EXPECT_EQ(end - begin, value.at("shape").at(0).get<int64_t>() * item) << key;
      EXPECT_EQ(begin % item, 0) << key << " is not aligned";
      ranges[begin] = end;
    }
    int64_t end = 0;
    for (const auto& [from, to] : ranges) {
      EXPECT_EQ(from, end) << "a hole";
      end = to;
    }
    EXPECT_EQ(end, static_cast<int64_t>(file.data.size()));
  }
}

// With as many ranks as saved, a rank opens its own file, and rank 0's for the buffers.
TEST(CheckpointFiles, ARankOpensNoFilesOfOtherRanks) {
  TESSERA_ON_HOST_ONLY("fake worlds connect ranks through host memory");
  constexpr int kRanks = 4;
  const ScratchDirectory scratch;
  const auto file_of = [](int rank) {
    return fmt::format("rank-{:05}-of-00004.safetensors", rank);
  };
  std::vector<torch::Tensor> shards(kRanks);
  const auto shard_of = [](const Sharded<Picture>& sharded) {
    std::vector<torch::Tensor> parts;
    for (const auto& unit : sharded.state()->units()) parts.push_back(unit->updated().clone());
    return torch::cat(parts);
  };
  run_world(kRanks, [&](World& world) {
    auto sharded = fully_shard(make_picture(1));
    save_checkpoint(scratch / "one", sharded, nullptr);
    shards[world.rank()] = shard_of(sharded);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto copy = scratch / fmt::format("of-{}", rank);
    fs::copy(scratch / "one", copy);
    for (int other = 1; other < kRanks; ++other)
      if (other != rank) fs::remove(copy / file_of(other));
    const auto world = fake_world(kRanks, rank);
    auto sharded = fully_shard(make_picture(2));
    EXPECT_FALSE(shard_of(sharded).equal(shards[rank]));
    load_checkpoint(copy, sharded, nullptr);
    EXPECT_TRUE(shard_of(sharded).equal(shards[rank])) << "rank " << rank;
    fs::remove(copy / file_of(rank));
    EXPECT_THROW(load_checkpoint(copy, sharded, nullptr), c10::Error) << "rank " << rank;
  }
}

TEST(CheckpointFiles, IndexTellsWhatIsStoredWhere) {
  const ScratchDirectory scratch;
  run_world(3, [&](World&) {
    auto sharded = fully_shard(make_picture(1), {.level = ShardLevel::kNone});
    save_checkpoint(scratch / "one", sharded, nullptr,
                    {.numbers = {{"step", 7}}, .random_state = false});
  });
  const auto index = read_index(scratch / "one");
  EXPECT_EQ(index.at("format_version"), 2);
  EXPECT_EQ(index.at("world_size"), 3);
  EXPECT_EQ(index.at("numbers").at("step"), 7.0);
  int64_t stored = 0;
  for (const auto& tensor : index.at("tensors")) {
    const auto names = tensor.at("names").get<std::vector<std::string>>();
    if (names[0] == "conv.weight") {
      EXPECT_EQ(tensor.at("strides"), (std::vector<int64_t>{27, 1, 9, 3}));
    }
    if (names[0] == "encode.weight" || names[0] == "decode") {
      EXPECT_EQ(names.size(), 2u);
    }
    for (const auto& chunk : tensor.at("chunks"))
      stored += chunk.at("end").get<int64_t>() - chunk.at("begin").get<int64_t>();
  }
  // Every value is stored once, though all three ranks hold all of them: 351 + 26 + 221 + 17 + 1
  // and the buffers' 27.
  EXPECT_EQ(stored, 351 + 26 + 221 + 17 + 1 + 27);
}

TEST(CheckpointFiles, ASecondSaveReplacesTheFirstWhole) {
  const ScratchDirectory scratch;
  run_world(3, [&](World&) { save_checkpoint(scratch / "one", *Filled(1).sharded, nullptr); });
  const fs::path link = scratch / "link";
  fs::create_directory_symlink(scratch / "one", link);
  run_world(2, [&](World&) { save_checkpoint(link.string() + "/", *Filled(2).sharded, nullptr); });
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(names_in(scratch / "one").size(), 3u);  // no file of the three ranks is left
  EXPECT_EQ(names_in(scratch / "").size(), 2u);     // no draft
  run_world(3, [&](World&) { expect_holds(scratch / "one", 2); });
}

TEST(CheckpointFiles, AnythingButACheckpointIsNeverReplaced) {
  const ScratchDirectory scratch;
  std::ofstream(scratch / "file") << "text";
  fs::create_directories(scratch / "folder");
  std::ofstream((scratch / "folder") / "notes.txt") << "text";
  fs::create_directories(scratch / "other.tmp");
  std::ofstream((scratch / "other.tmp") / "notes.txt") << "text";
  run_world(2, [&](World&) {
    Filled model(1);
    const auto error = [&](const fs::path& path) {
      return error_of([&] { save_checkpoint(path, *model.sharded, nullptr); });
    };
    expect_contains(error(scratch / "file"), {"got a file"});
    expect_contains(error(scratch / "file/below"), {"/file"});
    expect_contains(error(scratch / "folder"), {"it has 'notes.txt'"});
    expect_contains(error(scratch / "other"), {"it has 'notes.txt'"});
    expect_contains(error(""), {"must name a directory"});
    expect_contains(error("/"), {"must name a directory"});
  });
  EXPECT_EQ(read_text(scratch / "file"), "text");
  EXPECT_EQ(names_in(scratch / "folder"), std::vector<std::string>{"notes.txt"});
  EXPECT_EQ(names_in(scratch / "other.tmp"), std::vector<std::string>{"notes.txt"});
}

TEST(CheckpointFiles, LeftoversOfASaveThatWasCutOffAreTakenUp) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    save_checkpoint(scratch / "one", *Filled(1).sharded, nullptr);
    if (world.rank() == 0) {
      fs::rename(scratch / "one", scratch / "one.old");  // between the two renames
      fs::create_directories(scratch / "one.tmp");
      std::ofstream((scratch / "one.tmp") / "rank-00000-of-00007.safetensors") << "half";
    }
    world.process_group()->barrier({"test"});
    expect_holds(scratch / "one", 1);
    save_checkpoint(scratch / "one", *Filled(2).sharded, nullptr);
    expect_holds(scratch / "one", 2);
  });
  EXPECT_EQ(names_in(scratch / ""), std::vector<std::string>{"one"});
  EXPECT_EQ(names_in(scratch / "one").size(), 3u);
}

}  // namespace tessera::testing::files_test
