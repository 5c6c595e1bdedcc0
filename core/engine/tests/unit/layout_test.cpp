#include "engine/unit/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

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

std::vector<int64_t> starts_in(const UnitLayout& unit, const ParamSlot& slot) {
  std::vector<int64_t> cuts;
  for (const int64_t bound : unit.bounds)
    if (bound > slot.offset && bound < slot.offset + slot.numel)
      cuts.push_back(bound - slot.offset);
  return cuts;
}

// Expects that borders are where rules let them be.
void check_cuts(const UnitLayout& unit, int ranks) {
  check(unit, ranks);
  for (const ParamSlot& slot : unit.slots)
    for (const int64_t cut : starts_in(unit, slot)) {
      EXPECT_NE(slot.cut, Cut::kWhole) << slot.name();
      EXPECT_EQ(cut % slot.block, 0) << slot.name();
    }
}

TEST(Cuts, TheFirstRuleThatFitsCounts) {
  const Model model({{"a.weight", {64, 16}}, {"a.bias", {64}}, {"b.weight", {64, 16}}, {"c", {9}}});
  const ShardPlan plan{.cuts = {{"a.weight", Cut::kWhole},
                                {"*.weight", Cut::kRows, 8},
                                {"*", Cut::kAnywhere, 1, 2},
                                {"*", Cut::kElements, 32}}};
  for (const int ranks : {1, 2, 3, 4}) {
    const auto units = model.lay_out(plan, ranks);
    ASSERT_EQ(units.size(), 1U);
    check_cuts(units[0], ranks);
    std::map<std::string, std::pair<Cut, int64_t>> cuts;
    for (const ParamSlot& slot : units[0].slots) cuts[slot.name()] = {slot.cut, slot.block};
    EXPECT_EQ(cuts["a.weight"].first, Cut::kWhole);
    EXPECT_EQ(cuts["b.weight"], std::pair(Cut::kRows, int64_t{128}));
    EXPECT_EQ(cuts["a.bias"], std::pair(Cut::kElements, int64_t{32}));
    EXPECT_EQ(cuts["c"], std::pair(Cut::kElements, int64_t{9}));
  }
}

// 64 bytes are 16 floats: eight rows of six.
TEST(Cuts, BlocksStayTogetherUntilABorderIsAligned) {
  const auto units = Model({{"a", {101, 6}}}).lay_out({.cuts = {{"a", Cut::kRows, 2}}}, 3);
  check_cuts(units[0], 3);
  EXPECT_EQ(units[0].bounds, (std::vector<int64_t>{0, 192, 384, 608}));
}

TEST(Cuts, OthersFillTheRanksUpAroundWholeParameters) {
  std::vector<Shape> shapes{{"w1", {16, 16}}, {"w2", {16, 32}}};
  for (int i = 0; i < 16; ++i) shapes.push_back({fmt::format("b{}", i), {100}});
  const Model model(shapes);
  for (const int ranks : {2, 3, 5}) {
    const auto units = model.lay_out({.cuts = {{"w*", Cut::kWhole}}}, ranks);
    ASSERT_EQ(units.size(), 1U);
    check_cuts(units[0], ranks);
    // 100 elements take 112. A rank may have to end a parameter, and make up for the one before.
    const int64_t even = (256 + 512 + 16 * 112) / ranks;
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_LE(std::abs(units[0].shard_numel(rank) - even), 2 * (112 + 16)) << rank;
  }
}

TEST(Cuts, LargeParametersThatMayBeCutAreNotPackedWithWholeOnes) {
  const Model model({{"embedding", {100, 16}}, {"w", {16, 16}}, {"b", {16}}, {"head", {100, 16}}});
  const auto units = model.lay_out({.unit_bytes = 20000, .cuts = {{"w", Cut::kWhole}}}, 4);
  ASSERT_EQ(units.size(), 2U);
  EXPECT_EQ(names_of(units[0]), (std::vector<std::string>{"embedding", "head"}));
  EXPECT_EQ(names_of(units[1]), (std::vector<std::string>{"w", "b"}));
  for (const UnitLayout& unit : units) check_cuts(unit, 4);
  EXPECT_EQ(model.lay_out({.cuts = {{"w", Cut::kRows}}}, 4).size(), 1U);
}

// A whole parameter can't lie within another: its owner takes the rest of that.
TEST(Cuts, AnOwnerEndsTheParameterThatLiesBeforeItsOwn) {
  const Model model({{"large", {4096}}, {"w", {4, 4}}});
  const auto units = model.lay_out({.cuts = {{"w", Cut::kWhole}}, .owners = {{"w", 1}}}, 4);
  check_cuts(units[0], 4);
  EXPECT_EQ(names_of(units[0]), (std::vector<std::string>{"large", "w"}));
  EXPECT_EQ(units[0].bounds[2], 4096 + 16);
  EXPECT_EQ(units[0].bounds[4], 4096 + 16);
}

TEST(Cuts, OwnersHaveEqualWorkOverAllUnits) {
  std::vector<Shape> shapes;
  for (int i = 0; i < 12; ++i) shapes.push_back({fmt::format("w{}", i), {16 * (1 + i % 3), 32}});
  const auto units = Model(shapes).lay_out({.unit_bytes = 0, .cuts = {{"*", Cut::kWhole}}}, 4);
  std::vector<int64_t> work(4, 0);
  for (const UnitLayout& unit : units) {
    check_cuts(unit, 4);
    for (const ParamSlot& slot : unit.slots) {
      const auto owner = std::ranges::upper_bound(unit.bounds, slot.offset) - unit.bounds.begin();
      work[owner - 1] += slot.numel * std::min(slot.sizes[0], slot.sizes[1]);
    }
  }
  const auto [least, most] = std::ranges::minmax(work);
  EXPECT_LE(most - least, 48 * 32 * 32) << fmt::format("{}", fmt::join(work, " "));
}

TEST(Cuts, PartsOfAllKindsHoldEachElementOnce) {
  const std::vector<Cut> kinds{Cut::kAnywhere, Cut::kRows, Cut::kElements, Cut::kWhole};
  for (int seed = 0; seed < 300; ++seed) {
    std::minstd_rand random(seed + 1);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
    std::vector<Shape> shapes;
    ShardPlan plan{.unit_bytes = below(3) * 400};
    for (int i = 0; i < 1 + below(6); ++i) {
      shapes.push_back({fmt::format("p{}", i), {below(20), 1 + below(9)}});
      plan.cuts.push_back({fmt::format("p{}*", i), kinds[below(4)], 1 + below(30)});
    }
    const int ranks = static_cast<int>(1 + below(5));
    size_t slots = 0;
    for (const UnitLayout& unit : Model(shapes).lay_out(plan, ranks)) {
      SCOPED_TRACE(seed);
      check_cuts(unit, ranks);
      slots += unit.slots.size();
    }
    EXPECT_EQ(slots, shapes.size());
  }
}

TEST(Cuts, RulesThatCantBeHonouredAreRefused) {
  const Model model({{"w", {6, 4}}, {"b", {6}}});
  const auto expect_refused = [&](const ShardPlan& plan, const std::vector<std::string>& parts) {
    expect_error([&] { model.lay_out(plan, 2); }, parts);
  };
  expect_refused({.cuts = {{"v", Cut::kWhole}}}, {"plan.cuts", "'v' fits no parameter", "'w'"});
  expect_refused({.cuts = {{"*", Cut::kRows, 1, 3}}}, {"'*' fits no parameter", "3 dims"});
  expect_refused({.cuts = {{"w", Cut::kRows, 7}}}, {"'w'", "at most its 6 rows", "got 7"});
  expect_refused({.cuts = {{"b", Cut::kElements, 9}}}, {"'b'", "at most its 6 elements", "got 9"});
  expect_refused({.owners = {{"w", 0}}}, {"plan.owners", "'w'", "Cut::kWhole"});
  expect_refused({.cuts = {{"w", Cut::kWhole}}, .owners = {{"w", 2}}}, {"ranks from 0 to 1"});
  Model column({{"w", {6, 1}}});
  column.tensors[0].tensor = torch::zeros({1, 6}).t().detach().requires_grad_();
  EXPECT_EQ(column.lay_out({.cuts = {{"w", Cut::kRows}}}, 2).size(), 1U);
  Model columns({{"w", {6, 4}}});
  columns.tensors[0].tensor = torch::zeros({4, 6}).t().detach().requires_grad_();
  expect_error(
      [&] {
        columns.lay_out({.cuts = {{"w", Cut::kRows}}}, 2);
      },
      {"rows of 'w'", "[1, 6]", "one after another"});
}

}  // namespace tessera::testing::layout_test
