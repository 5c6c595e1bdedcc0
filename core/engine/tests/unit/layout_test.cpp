#include "engine/unit/layout.h"

#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::testing::layout_test {

struct Shape {
  std::string name;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = true;
};

// The tensors must live as long as their slots are read.
struct Model {
  explicit Model(const std::vector<Shape>& shapes) {
    for (const Shape& shape : shapes) {
      tensors.push_back({shape.name, torch::zeros(shape.sizes, shape.dtype)});
      if (shape.requires_grad) tensors.back().tensor.requires_grad_();
    }
  }
  std::vector<UnitLayout> lay_out(ShardPlan plan, int ranks) const {
    if (!plan.unit_bytes) plan.unit_bytes = int64_t{10} << 20;
    return tessera::lay_out(collect_parameters(tensors), plan, ranks);
  }
  std::vector<NamedTensor> tensors;
};

std::vector<std::string> names_of(const UnitLayout& unit) {
  std::vector<std::string> names;
  for (const ParamSlot& slot : unit.slots) names.push_back(slot.name());
  return names;
}

// Expects the properties of any layout.
void check(const UnitLayout& unit, int ranks) {
  const int64_t alignment = 64 / static_cast<int64_t>(c10::elementSize(unit.dtype));
  ASSERT_EQ(unit.bounds.size(), ranks + 1U);
  EXPECT_EQ(unit.bounds[0], 0);
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_LE(unit.bounds[rank], unit.bounds[rank + 1]);
    EXPECT_EQ(unit.bounds[rank] % alignment, 0);
  }
  int64_t end = 0, in_chunks = 0;
  for (const ParamSlot& slot : unit.slots) {
    EXPECT_GE(slot.offset, end) << slot.name();
    EXPECT_EQ(slot.offset % alignment, 0) << slot.name();
    end = slot.offset + slot.numel;
    EXPECT_LE(end, unit.numel());
  }
  end = 0;
  for (const GradChunk& chunk : unit.chunks) {
    EXPECT_GE(chunk.begin, end);
    end = chunk.end;
    for (size_t slot = chunk.first_slot; slot < chunk.end_slot; ++slot) {
      if (unit.slots[slot].numel == 0) continue;
      EXPECT_GE(unit.slots[slot].offset, chunk.begin);
      EXPECT_LE(unit.slots[slot].offset + unit.slots[slot].numel, chunk.end);
      ++in_chunks;
    }
  }
  const auto filled = std::count_if(unit.slots.begin(), unit.slots.end(),
                                    [](auto& slot) { return slot.numel > 0; });
  EXPECT_EQ(in_chunks, filled);
}

TEST(FlatLayout, ShardsAreEqualAlignedAndHoldEverything) {
  const Model model(
      {{"a", {37, 3}}, {"b", {5}}, {"none", {0}}, {"c", {}}, {"big", {1000, 100}}, {"d", {7}}});
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const auto units = model.lay_out({}, ranks);
    ASSERT_EQ(units.size(), 1U);
    check(units[0], ranks);
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_EQ(units[0].shard_numel(rank), units[0].shard_numel(0));
    EXPECT_LT(units[0].numel(), 37 * 3 + 5 + 1 + 100000 + 7 + 6 * 16 + ranks * 16);
    // Small ones, the large one alone, small ones.
    EXPECT_EQ(units[0].chunks.size(), 3U);
    EXPECT_TRUE(units[0].chunks[1].is_single());
  }
}

TEST(FlatLayout, FewerElementsThanRanksLeaveEmptyShards) {
  const auto units = Model({{"a", {3}}}).lay_out({}, 4);
  check(units[0], 4);
  EXPECT_EQ(units[0].numel(), 64);
  EXPECT_EQ(units[0].slots[0].offset, 0);
}

TEST(FlatLayout, AlignmentFollowsTheElementSize) {
  for (const auto dtype : {at::kDouble, at::kBFloat16, at::kChar, at::kComplexDouble}) {
    const auto units = Model({{"a", {5}, dtype, false}, {"b", {5}, dtype, false}}).lay_out({}, 2);
    EXPECT_EQ(units[0].slots[1].offset * static_cast<int64_t>(c10::elementSize(dtype)) % 64, 0);
    EXPECT_EQ(units[0].bounds[1] * static_cast<int64_t>(c10::elementSize(dtype)) % 64, 0);
  }
}

TEST(WholeParamLayout, TheLeastLoadedRankOwnsTheNextParameterTheLowestOfEquals) {
  const Model model({{"a", {10}},
                     {"b", {4}},
                     {"frozen", {1000}, at::kFloat, false},
                     {"c", {4}},
                     {"d", {5}},
                     {"e", {1}}});
  const auto units = model.lay_out({.partition = Partition::kWholeParam}, 3);
  ASSERT_EQ(units.size(), 2U);
  check(units[0], 3);
  // Loads: a -> 0 (10), b -> 1 (4), the frozen one counts 0, c -> 2 (4), d -> 1 (9), e -> 2.
  EXPECT_EQ(names_of(units[0]), (std::vector<std::string>{"a", "b", "d", "c", "e"}));
  EXPECT_EQ(units[0].slots[1].offset, units[0].bounds[1]);
  EXPECT_EQ(units[0].slots[3].offset, units[0].bounds[2]);
  EXPECT_EQ(names_of(units[1]), std::vector<std::string>{"frozen"});
}

TEST(WholeParamLayout, OwnersAreCountedOverAllUnits) {
  const Model model({{"a", {8}}, {"b", {8}}, {"c", {8}}, {"d", {8}}});
  const auto units = model.lay_out({.partition = Partition::kWholeParam, .unit_bytes = 0}, 3);
  ASSERT_EQ(units.size(), 4U);
  for (size_t i = 0; i < 4; ++i) {
    check(units[i], 3);
    for (size_t rank = 0; rank < 3; ++rank)
      EXPECT_EQ(units[i].shard_numel(rank), i % 3 == rank ? 16 : 0);
  }
}

TEST(Units, ArePackedBySizeInRegistrationOrder) {
  const Model model({{"a", {100}}, {"b", {100}}, {"c", {300}}, {"d", {20}}, {"e", {50}}});
  const auto units = model.lay_out({.unit_bytes = 1000}, 2);
  ASSERT_EQ(units.size(), 3U);
  EXPECT_EQ(names_of(units[0]), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(names_of(units[1]), std::vector<std::string>{"c"});
  EXPECT_EQ(names_of(units[2]), (std::vector<std::string>{"d", "e"}));
  EXPECT_EQ(units[0].name, "a..b");
  EXPECT_EQ(model.lay_out({.unit_bytes = 0}, 2).size(), 5U);
}

TEST(Units, OfALargeParameterTakeItsBiasAlongAndNoMore) {
  const Model model({{"a.weight", {2000}},  // 8,000 bytes
                     {"a.bias", {8}},       // 32; 1/64 of a unit is 100
                     {"a.scale", {16}},     // 64
                     {"a.shift", {16}},     // 64: too much in all
                     {"b.weight", {2000}},
                     {"c.bias", {8}}});  // of another module
  std::vector<std::vector<std::string>> names;
  for (const UnitLayout& unit : model.lay_out({.unit_bytes = 6400}, 2))
    names.push_back(names_of(unit));
  EXPECT_EQ(names, (std::vector<std::vector<std::string>>{
                       {"a.weight", "a.bias", "a.scale"}, {"a.shift"}, {"b.weight"}, {"c.bias"}}));
  EXPECT_EQ(model.lay_out({.unit_bytes = 0}, 2).size(), 6U);
}

TEST(Units, OfOneModuleWithManySmallParametersDoNotGrow) {
  const Model model({{"a", {2000}}, {"b", {8}}, {"c", {16}}, {"d", {16}}, {"e", {16}}});
  EXPECT_EQ(model.lay_out({.unit_bytes = 6400}, 2).size(), 2U);
}

TEST(Units, HoldParametersOfOneKind) {
  const Model model({{"a", {9}},
                     {"half", {9}, at::kHalf},
                     {"frozen", {9}, at::kFloat, false},
                     {"b", {9}},
                     {"index", {9}, at::kLong, false}});
  const auto units = model.lay_out({}, 2);
  ASSERT_EQ(units.size(), 4U);
  EXPECT_EQ(names_of(units[0]), (std::vector<std::string>{"a", "b"}));
}

TEST(Units, CanBeListedByName) {
  const Model model({{"a", {9}}, {"b", {9}}, {"c", {9}}, {"d", {9}}});
  const auto units = model.lay_out({.unit_bytes = 0, .units = {{"d", "a"}}}, 2);
  ASSERT_EQ(units.size(), 3U);
  EXPECT_EQ(names_of(units[0]), (std::vector<std::string>{"a", "d"}));
  expect_error([&] { model.lay_out({.units = {{"a"}, {"z"}}}, 2); }, {"plan.units", "'z'"});
  expect_error(
      [&] {
        model.lay_out({.units = {{"a"}, {"a"}}}, 2);
      },
      {"plan.units", "'a'", "more than one"});
  expect_error([&] { model.lay_out({.whole = {"y"}}, 2); }, {"plan.whole", "'y'"});
}

TEST(Units, ThatStayWholeAreOfALowerLevel) {
  const Model model({{"a", {9}}, {"b", {100}}, {"c", {10}}, {"d", {200}}});
  const auto units = model.lay_out({.whole_numel = 10, .whole = {"d"}}, 2);
  ASSERT_EQ(units.size(), 2U);
  EXPECT_EQ(names_of(units[0]), (std::vector<std::string>{"a", "c", "d"}));
  EXPECT_EQ(units[0].level, ShardLevel::kGradients);
  EXPECT_EQ(names_of(units[1]), std::vector<std::string>{"b"});
  EXPECT_EQ(units[1].level, ShardLevel::kParameters);
}

TEST(CollectParameters, ChannelsLastKeepsItsStridesAndGapsAreClosed) {
  const auto conv = torch::zeros({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto gaps = torch::zeros({6, 8}).slice(1, 0, 8, 2);
  const auto params =
      collect_parameters({{"conv", conv}, {"gaps", gaps}, {"t", torch::zeros({3, 5}).t()}});
  EXPECT_EQ(params[0].strides, conv.strides().vec());
  EXPECT_EQ(params[1].strides, (std::vector<int64_t>{4, 1}));
  EXPECT_EQ(params[2].strides, (std::vector<int64_t>{1, 5}));
}

TEST(CollectParameters, TiesAreFoundBySharedTensorAndBySharedMemory) {
  const auto w = torch::zeros({3, 4});
  const auto params =
      collect_parameters({{"a", w}, {"b", torch::zeros({2})}, {"a2", w}, {"a3", w.detach()}});
  ASSERT_EQ(params.size(), 2U);
  EXPECT_EQ(params[0].names, (std::vector<std::string>{"a", "a2", "a3"}));
  EXPECT_EQ(params[0].handles.size(), 2U);
}

TEST(CollectParameters, DisjointPartsOfOneStorageAreParametersOfTheirOwn) {
  const auto w = torch::zeros({10});
  EXPECT_EQ(collect_parameters({{"a", w.narrow(0, 0, 5)}, {"b", w.narrow(0, 5, 5)}}).size(), 2U);
}

TEST(CollectParameters, RefusesWhatCannotBeSharded) {
  const auto w = torch::zeros({10});
  expect_error([&] { collect_parameters({}); }, {"must have parameters"});
  expect_error(
      [&] {
        collect_parameters({{"a", w.narrow(0, 0, 6)}, {"b", w.narrow(0, 5, 5)}});
      },
      {"'a'", "'b'", "overlap"});
  expect_error([&] { collect_parameters({{"a", torch::Tensor()}}); }, {"'a'", "undefined"});
  expect_error(
      [&] {
        collect_parameters({{"a", torch::zeros({2}, torch::kMeta)}});
      },
      {"'a'", "meta"});
  expect_error(
      [&] {
        collect_parameters({{"a", torch::zeros({2, 2}).to_sparse()}});
      },
      {"'a'", "dense"});
}

}  // namespace tessera::testing::layout_test
