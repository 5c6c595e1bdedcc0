// Indices that are damaged or crafted to do harm: every reader of the checkpoint names the faulty
// file, and creates nothing from it.
#include <fmt/ranges.h>
#include <tessera/interop/exchange.h>

#include <ctime>

#include "checkpoint/checksum.h"
#include "checkpoint/tests/saved_model.h"

namespace tessera::testing::hostile_index_test {

namespace fs = std::filesystem;
using nlohmann::json;
using Lines = std::vector<std::string>;

constexpr int64_t kHuge = int64_t{1} << 62, kWraps = int64_t{1} << 32;  // kWraps squared is 2^64

/// A checkpoint of named tensors whose index the tests change by hand.
class HostileIndex : public ::testing::Test {
 protected:
  HostileIndex() : one_(scratch_ / "one") {
    const torch::Tensor value = torch::arange(24.).view({4, 6});
    Bag bag;
    bag.add("a", value.to(torch::kFloat));
    bag.add("b", torch::ones({4}));
    save_checkpoint(one_, bag, nullptr, {.rank_state = {{"mine", torch::ones({2})}}});
    save_checkpoint(scratch_ / "other", bag, nullptr);
    whole_ = read_index(one_);
    whole_.erase("checksum");  // as if written by hand
  }

  /// Returns the entry of the tensor of this name in a whole index.
  static json& tensor(json& index, const std::string& name) {
    for (json& tensor : index.at("tensors"))
      if (tensor.at("names").at(0) == name) return tensor;
    throw std::runtime_error("no tensor " + name);
  }

  void write(const json& index) const {
    std::ofstream(one_ / "index.json", std::ios::binary) << index.dump();
  }

  /// Changes the index by `change`; every reader of the checkpoint must then throw an error with
  /// these parts and leave nothing behind.
  void expect_refused(const std::function<void(json&)>& change, const Lines& parts) {
    json index = whole_;
    change(index);
    write(index);
    const auto refuse = [&](const char* what, const std::function<void()>& read) {
      SCOPED_TRACE(what);
      expect_contains(error_of(read), parts);
    };
    refuse("reshard", [&] { reshard_checkpoint(one_, scratch_ / "to", 2); });
    refuse("export", [&] { export_checkpoint(one_, scratch_ / "to.safetensors"); });
    refuse("read", [&] { CheckpointTensors(one_, /*with_state=*/true).read(0); });
    refuse("diff", [&] { compare_checkpoints(one_, scratch_ / "other"); });
    refuse("diff", [&] { compare_checkpoints(scratch_ / "other", one_); });
    refuse("load", [&] {
      Bag bag;
      bag.add("a", torch::zeros({4, 6}));
      bag.add("b", torch::zeros({4}));
      load_checkpoint(one_, bag, nullptr);
    });
    expect_contains(fmt::format("{}", fmt::join(verify_checkpoint(one_), "\n")), parts);
    EXPECT_EQ(names_in(scratch_.path()), (Lines{"one", "other"}));
  }

  std::string index_path() const { return (one_ / "index.json").string(); }
  std::string file_path() const { return (one_ / "rank-00000-of-00001.safetensors").string(); }

  ScratchDirectory scratch_;
  fs::path one_;
  json whole_;
};

TEST_F(HostileIndex, IsReadIfNothingWasChanged) {
  write(whole_);
  EXPECT_EQ(verify_checkpoint(one_), Lines());
  EXPECT_EQ(compare_checkpoints(one_, scratch_ / "other"), Lines());
}

TEST_F(HostileIndex, TooFewOrTooManyChecksumsAreRefused) {
  for (const json& checksums : {json::array(), json({"0123456789abcdef", "0123456789abcdef"})})
    expect_refused([&](json& index) { tensor(index, "a")["chunks"][0]["xxh3"] = checksums; },
                   {index_path(), "checksums", "'param/a"});
}

TEST_F(HostileIndex, PiecesThatTheFileLacksAreNamedWithTheFile) {
  expect_refused([](json& index) { tensor(index, "a")["chunks"][0]["key"] = "param/none"; },
                 {file_path(), "lacks 'param/none'"});
  expect_refused([](json& index) { tensor(index, "a")["chunks"][0]["file"] = "none"; },
                 {(one_ / "none").string(), "No such file"});
}

TEST_F(HostileIndex, RanksThatAreNoneAreRefused) {
  for (const char* rank : {"-1", "1", "one", "0x0", "99999999999999999999", ""})
    expect_refused([&](json& index) { tensor(index, "user/mine")["state"] = rank; },
                   {index_path(), "rank"});
}

TEST_F(HostileIndex, BoxesThatAreNotInTheTensorAreRefused) {
  const auto with_box = [](const json& box, int64_t end) {
    return [box, end](json& index) {
      json& chunk = tensor(index, "a")["chunks"][0];
      chunk["box"] = box;
      chunk["end"] = end;
    };
  };
  const int64_t most = std::numeric_limits<int64_t>::max();
  const json whole = {{"shape", {4, 6}}, {"offset", {0, 0}}, {"sizes", {4, 6}}};
  const auto changed = [&](const char* key, const json& value) {
    json box = whole;
    box[key] = value;
    return box;
  };
  expect_refused(with_box(changed("offset", {most, 0}), 24), {index_path(), "box"});
  expect_refused(with_box(changed("offset", {most - 3, 0}), 24), {index_path(), "box"});
  expect_refused(with_box(changed("offset", {0, 1}), 24), {index_path(), "box"});
  expect_refused(with_box(changed("sizes", {most, 6}), 24), {index_path(), "box"});
  expect_refused(with_box(changed("shape", {4, 6, kWraps, kWraps}), 24), {index_path(), "box"});
  expect_refused(
      with_box({{"shape", {24 + (int64_t{1} << 61), 8}}, {"offset", {0, 0}}, {"sizes", {3, 8}}},
               24),
      {index_path(), "box"});
}

TEST_F(HostileIndex, RangesThatAreNotInTheTensorAreRefused) {
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 24}, {0, kHuge}, {24, 0}, {-kHuge - kHuge, kHuge}, {0, 0}})
    expect_refused(
        [b = begin, e = end](json& index) {
          tensor(index, "a")["chunks"][0]["begin"] = b;
          tensor(index, "a")["chunks"][0]["end"] = e;
        },
        {index_path()});
}

TEST_F(HostileIndex, ShapesThatOverflowOrOverlapAreRefused) {
  const auto with = [](const json& shape, const json& strides) {
    return [shape, strides](json& index) {
      tensor(index, "a")["shape"] = shape;
      tensor(index, "a")["strides"] = strides;
    };
  };
  expect_refused(with({kWraps, kWraps}, {kWraps, 1}), {index_path(), "'param/a'"});
  expect_refused(with({4, 6, 0, kHuge, kHuge}, {1, 1, 1, 1, 1}), {index_path(), "'param/a'"});
  expect_refused(with({2, 2, 6}, {kHuge, kHuge, 1}), {index_path(), "'param/a'"});
  expect_refused(with({4, 6}, {1, 1}), {index_path(), "'param/a'"});
  expect_refused(with({4, 6}, {0, 4}), {index_path(), "'param/a'"});
  expect_refused(with({4, 6}, {6}), {index_path(), "'param/a'"});
  expect_refused(with({4, 2, 3}, {0, 1, 23}), {index_path(), "'param/a'"});
}

TEST_F(HostileIndex, NumbersThatAreNoneOfTheirKindAreRefused) {
  const auto at = [](const char* pointer, const json& value) {
    return [pointer, value](json& index) { index[json::json_pointer(pointer)] = value; };
  };
  expect_refused(at("/world_size", 0), {index_path(), "world_size"});
  expect_refused(at("/world_size", kHuge), {index_path(), "world_size"});
  expect_refused(at("/world_size", 1e300), {index_path(), "world_size"});
  expect_refused(at("/tensors/0/shape/0", 1e300), {index_path(), "whole number"});
  expect_refused(at("/tensors/0/shape/0", uint64_t{1} << 63), {index_path(), "whole number"});
  expect_refused(at("/tensors/0/kind", "unknown"), {index_path(), "kind"});
  expect_refused(at("/tensors/0/dtype", "F3"), {index_path(), "F3"});
  expect_refused(at("/numbers", json({{"step", "many"}})), {index_path(), "many"});
  expect_refused(at("/numbers", json::array({1})), {index_path()});
}

TEST_F(HostileIndex, TensorsThatAreThereTwiceAreRefused) {
  expect_refused([](json& index) { index["tensors"].push_back(tensor(index, "a")); },
                 {index_path(), "'param/a' twice"});
}

TEST_F(HostileIndex, ValuesThatNestDeeplyAreRefused) {
  std::string text = whole_.dump();
  for (const char* name : {"\"format\":", "\"id\":", "\"world_size\":"}) {
    const size_t place = text.find(name) + std::strlen(name);
    std::string deep = text;
    deep.insert(place, std::string(300'000, '[') + std::string(300'000, ']') + ",\"x\":");
    std::ofstream(one_ / "index.json", std::ios::binary) << deep;
    expect_contains(error_of([&] { inspect_checkpoint(one_); }), {index_path(), "nest at most"});
  }
}

// A hundred thousand pieces, every two of which would have to be compared without further
// knowledge.
TEST_F(HostileIndex, ManyBoxesAreReadInNoTime) {
  constexpr int64_t kRows = 300, kColumns = 300;
  json index = whole_;
  json& a = tensor(index, "a");
  const json chunk = a["chunks"][0];
  a["shape"] = {kRows, kColumns};
  a["strides"] = {kColumns, 1};
  a["chunks"] = json::array();
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    json piece = chunk;
    piece["begin"] = 0, piece["end"] = 1;
    piece["box"] = {
        {"shape", {kRows, kColumns}}, {"offset", {i / kColumns, i % kColumns}}, {"sizes", {1, 1}}};
    a["chunks"].push_back(piece);
  }
  write(index);
  const std::clock_t begin = std::clock();
  EXPECT_EQ(inspect_checkpoint(one_).tensors.size(), whole_.at("tensors").size());
  EXPECT_LT(std::clock() - begin, 10 * CLOCKS_PER_SEC);
}

}  // namespace tessera::testing::hostile_index_test
