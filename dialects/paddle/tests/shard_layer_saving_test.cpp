// `save_state_dict` and `load_state_dict`.
#include <filesystem>
#include <fstream>

#include "dialects/paddle/tests/shard_layer.h"
#include "support/scratch_directory.h"

namespace tessera::testing::shard_layer_saving_test {

namespace fs = std::filesystem;
using paddle::flatten_state_dict;
using paddle::load_state_dict;
using paddle::save_state_dict;

// The two tensors of Paddle's tests.
at::Tensor w1() { return on_test_device(torch::arange(32).view({4, 8})); }
at::Tensor w2() { return on_test_device(torch::arange(100, 104).view({2, 2})); }

int64_t stored_bytes(const fs::path& path) {
  int64_t nbytes = 0;
  for (const CheckpointTensor& tensor : inspect_checkpoint(path).tensors)
    if (tensor.kind == "tensor") nbytes += tensor.nbytes;
  return nbytes;
}

TEST(StateDict, SL_60_EachRankWritesAFileAndNestedDictsHaveDots) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    const ProcessMesh mesh({0, 1});
    save_state_dict(flatten_state_dict({{"model", {{"w1", distribute(w1(), mesh, {Shard{0}})}}},
                                        {"more", {{"w2", w2()}}}}),
                    scratch / "one");
  });
  const CheckpointSummary summary = inspect_checkpoint(scratch / "one");
  EXPECT_EQ(summary.files,
            (std::vector<std::string>{"index.json", "rank-00000-of-00002.safetensors",
                                      "rank-00001-of-00002.safetensors"}));
  ASSERT_EQ(summary.tensors.size(), 2U);
  EXPECT_EQ(summary.tensors[0].names.front(), "model.w1");
  EXPECT_EQ(summary.tensors[0].pieces, 2);
  EXPECT_EQ(summary.tensors[1].names.front(), "more.w2");
  expect_error(
      [] {
        flatten_state_dict({{"a", {{"b.c", w1()}}}, {"a.b", {{"c", w1()}}}});
      },
      {"two tensors would be 'a.b.c'"});
}

TEST(StateDict, SL_60_ASecondSaveReplacesTheFirst) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    for (const int64_t value : {1, 2}) {
      save_state_dict({{"w", torch::full({3}, value)}}, scratch / "one");
      const StateDict state = {{"w", torch::zeros({3}, torch::kLong)}};
      EXPECT_TRUE(load_state_dict(state, scratch / "one").empty());
      EXPECT_TRUE((state.at("w") == value).all().item<bool>());
    }
  });
  EXPECT_EQ(verify_checkpoint(scratch / "one"), std::vector<std::string>());
}

TEST(StateDict, SL_61_ReplicatedValuesAreSavedOnce) {
  const ScratchDirectory scratch;
  run_world(4, [&](World&) {
    const ProcessMesh mesh({{0, 1}, {2, 3}});
    save_state_dict({{"ordinary", w1()},
                     {"replicated", distribute(w1(), mesh, {})},
                     {"rows", distribute(w1(), mesh, {Replicate{}, Shard{0}})}},
                    scratch / "one");
  });
  EXPECT_EQ(stored_bytes(scratch / "one"), 3 * 32 * 8);
  int64_t pieces = 0;
  for (const CheckpointTensor& tensor : inspect_checkpoint(scratch / "one").tensors)
    pieces += tensor.pieces;
  EXPECT_EQ(pieces, 1 + 1 + 2);
}

// The placements of w1 and w2 on a number of ranks.
struct Layout {
  std::vector<int64_t> mesh;
  Placements w1, w2;
};
const std::map<int, std::vector<Layout>> kLayouts = {
    {1, {{{1}, {Shard{0}}, {Replicate{}}}}},
    {2, {{{2}, {Shard{0}}, {Shard{1}}}, {{2}, {Shard{1}}, {Replicate{}}}}},
    {4,
     {{{4}, {Shard{0}}, {Shard{0}}},  // two ranks have nothing of w2
      {{2, 2}, {Shard{0}, Shard{1}}, {Shard{1}, Shard{0}}},
      {{2, 2}, {Shard{1}, Shard{0}}, {Replicate{}, Shard{1}}}}},
    {8,
     {{{8}, {Shard{1}}, {Replicate{}}},
      {{2, 4}, {Shard{1}, Shard{0}}, {Shard{0}, Shard{1}}},
      {{4, 2}, {Shard{1}, Shard{1}}, {Replicate{}, Shard{0}}}}}};

StateDict make_state(const Layout& layout, bool with_values) {
  const auto mesh = DeviceMesh::over_world(layout.mesh);
  const auto make = [&](const at::Tensor& value, const Placements& placements) {
    return distribute(with_values ? value : torch::full_like(value, -1), mesh, placements);
  };
  return {{"w1", make(w1(), layout.w1)}, {"w2", make(w2(), layout.w2)}};
}

TEST(StateDict, SL_62_LoadsAtOtherNumbersOfRanksMeshesAndPlacements) {
  const ScratchDirectory scratch;
  const auto has_devices = [](int ranks) { return tests_on_host() || ranks <= 4; };
  for (const auto& [ranks, layouts] : kLayouts) {
    if (!has_devices(ranks)) continue;
    for (const Layout& layout : layouts) {
      run_world(ranks, [&](World&) { save_state_dict(make_state(layout, true), scratch / "one"); });
      for (const auto& [others, other_layouts] : kLayouts) {
        if (!has_devices(others)) continue;
        const auto load = [&, ranks = ranks, others = others](const Layout& other) {
          const StateDict state = make_state(other, false);
          EXPECT_TRUE(load_state_dict(state, scratch / "one").empty());
          EXPECT_TRUE(full_tensor(state.at("w1")).equal(w1())) << ranks << " -> " << others;
          EXPECT_TRUE(full_tensor(state.at("w2")).equal(w2())) << ranks << " -> " << others;
        };
        run_world(others, [&, &other_layouts = other_layouts](World&) {
          for (const Layout& other : other_layouts) load(other);
        });
      }
    }
  }
}

TEST(StateDict, SL_62_WhatFullyShardSavedLoadsByName) {
  const ScratchDirectory scratch;
  run_world(3, [&](World&) {
    TwoLayers model;
    const at::Tensor expected = model->fc1->weight.detach().clone();
    save_checkpoint(scratch / "one", fully_shard(model), nullptr);
    const ProcessMesh mesh({0, 1, 2});
    const StateDict state = {
        {"fc1.weight", distribute(torch::zeros_like(expected), mesh, {Shard{1}})},
        {"scale", torch::zeros({8}, torch::kBFloat16)}};
    EXPECT_TRUE(load_state_dict(state, scratch / "one").empty());
    EXPECT_TRUE(full_tensor(state.at("fc1.weight")).equal(expected));
    EXPECT_TRUE((state.at("scale") == 2).all().item<bool>());  // converted
  });
}

TEST(StateDict, SL_63_MissingNamesAreWarnedOfAndMissingFilesAreErrors) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    const ProcessMesh mesh({0, 1});
    save_state_dict({{"w1", distribute(w1(), mesh, {Shard{0}})}}, scratch / "one");
    const StateDict state = {{"w1", torch::zeros_like(w1())}, {"w3", torch::ones({2})}};
    EXPECT_EQ(load_state_dict(state, scratch / "one"), std::vector<std::string>{"w3"});
    EXPECT_TRUE(state.at("w1").equal(w1()));
    EXPECT_TRUE((state.at("w3") == 1).all().item<bool>());
    // Other shapes and dtypes: one error reports all, and nothing is changed.
    const StateDict wrong = {{"w1", torch::zeros({8, 4}, torch::kLong)}};
    expect_error([&] { load_state_dict(wrong, scratch / "one"); },
                 {"'w1' has the shape [8, 4] (the checkpoint's: [4, 8])"});
    EXPECT_TRUE((wrong.at("w1") == 0).all().item<bool>());
    expect_error(
        [&] {
          load_state_dict({{"w1", torch::zeros({4, 8})}}, scratch / "one");
        },
        {"'w1' is F32 (the checkpoint's: I64)"});
    world.process_group()->barrier({"test"});
    if (world.rank() == 0) fs::remove(scratch / "one" / "rank-00001-of-00002.safetensors");
    world.process_group()->barrier({"test"});
    expect_error([&] { load_state_dict(state, scratch / "one"); },
                 {"could not open", "rank-00001-of-00002.safetensors"});
    if (world.rank() == 0) fs::remove(scratch / "one" / "index.json");
    world.process_group()->barrier({"test"});
    expect_error([&] { load_state_dict(state, scratch / "one"); },
                 {"could not open", "index.json"});
  });
}

TEST(StateDict, SL_64_ARankReadsWhatItNeeds) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    save_state_dict({{"w1", distribute(w1(), ProcessMesh({0, 1}), {Shard{0}})}}, scratch / "one");
  });
  fs::rename(scratch / "one" / "rank-00001-of-00002.safetensors", scratch / "away");
  run_world(2, [&](World& world) {
    const StateDict state = {
        {"w1", distribute(torch::zeros_like(w1()), DeviceMesh::over_world({1, 2}), {})}};
    // Here both ranks need all of it.
    expect_error([&] { load_state_dict(state, scratch / "one"); }, {"rank-00001-of-00002"});
    world.process_group()->barrier({"test"});
    // Here only rank 1 needs the missing file: the error says so, on both ranks.
    const StateDict rows = {
        {"w1", distribute(torch::zeros_like(w1()), ProcessMesh({0, 1}), {Shard{0}})}};
    expect_error(
        [&] { load_state_dict(rows, scratch / "one"); },
        {"rank-00001-of-00002", world.rank() == 0 ? "(on rank 1 of 2)" : "could not open"});
  });
}

TEST(StateDict, SL_65_OtherNamesOnARankAreAnErrorThatNamesThemOnEveryRank) {
  const ScratchDirectory scratch;
  run_world(3, [&](World& world) {
    StateDict state = {{"w1", w1()}, {"w2", w2()}};
    if (world.rank() == 1) state["extra"] = w2();
    if (world.rank() == 2) state.erase("w2");
    expect_error([&] { save_state_dict(state, scratch / "one"); },
                 {"all ranks must have the same names", "rank 0 lacks 'extra' of rank 1",
                  "rank 2 lacks 'w2'"});
  });
  EXPECT_FALSE(fs::exists(scratch / "one"));
}

}  // namespace tessera::testing::shard_layer_saving_test
