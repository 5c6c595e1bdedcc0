#include "checkpoint/region.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace tessera::region_test {

// The elements of a region, in its order, found by indexing a tensor of element numbers.
std::vector<int64_t> elements_of(const Region& region, int64_t numel) {
  torch::Tensor all = torch::arange(numel);
  if (region.box) {
    all = all.view(region.box->shape);
    for (size_t dim = 0; dim < region.box->shape.size(); ++dim)
      all = all.narrow(static_cast<int64_t>(dim), region.box->offset[dim], region.box->sizes[dim]);
    all = all.reshape({-1});
  }
  const torch::Tensor part = all.slice(0, region.begin, region.end).contiguous();
  return {part.data_ptr<int64_t>(), part.data_ptr<int64_t>() + part.numel()};
}

Region random_region(const std::vector<int64_t>& shape, std::mt19937& random) {
  const auto some = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  Region region;
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  if (some(0, 3) > 0) {
    Box box{shape, {}, {}};
    for (const int64_t size : shape) {
      box.offset.push_back(some(0, size - 1));
      box.sizes.push_back(some(1, size - box.offset.back()));
    }
    numel = box.numel();
    region.box = std::move(box);
  }
  region.begin = some(0, numel - 1);
  region.end = some(region.begin, numel);
  return region;
}

TEST(Region, OverlapsAreWhatTheElementsHaveInCommon) {
  std::mt19937 random(7);
  const std::vector<std::vector<int64_t>> shapes = {{7}, {4, 6}, {3, 1, 5}, {2, 3, 2, 3}};
  for (int round = 0; round < 2000; ++round) {
    const auto& shape = shapes[static_cast<size_t>(round) % shapes.size()];
    int64_t numel = 1;
    for (const int64_t size : shape) numel *= size;
    const Region a = random_region(shape, random), b = random_region(shape, random);
    const auto left = elements_of(a, numel), right = elements_of(b, numel);
    std::set<int64_t> expected, found;
    for (const int64_t element : left)
      if (std::find(right.begin(), right.end(), element) != right.end()) expected.insert(element);
    for_each_overlap(a, b, [&](const Overlap& common) {
      for (int64_t i = 0; i < common.count; ++i) {
        ASSERT_EQ(left.at(common.a + i), right.at(common.b + i));
        EXPECT_TRUE(found.insert(left[common.a + i]).second) << "visited twice";
      }
    });
    EXPECT_EQ(found, expected);
    EXPECT_EQ(overlap(a, b), !expected.empty());
  }
}

TEST(Region, GapsAndOverlapsOfPiecesAreFound) {
  const auto gap = [](int64_t numel, std::vector<Region> regions) {
    std::vector<const Region*> pointers;
    for (const Region& region : regions) pointers.push_back(&region);
    return describe_gap(numel, pointers);
  };
  const Box left{{4, 6}, {0, 0}, {4, 2}}, right{{4, 6}, {0, 2}, {4, 4}},
      wide{{4, 6}, {0, 1}, {4, 5}};
  EXPECT_EQ(gap(0, {}), "");
  EXPECT_EQ(gap(5, {{3, 5}, {0, 3}}), "");
  EXPECT_EQ(gap(5, {{0, 3}, {4, 5}}), "has a gap or an overlap at element 3");
  EXPECT_EQ(gap(5, {{0, 3}, {2, 5}}), "has a gap or an overlap at element 3");
  EXPECT_EQ(gap(5, {{0, 3}}), "has 5 elements, but 3 are stored");
  EXPECT_EQ(gap(24, {{0, 8, left}, {0, 16, right}}), "");
  EXPECT_EQ(gap(24, {{0, 8, left}, {5, 16, right}, {0, 5, right}}), "");
  EXPECT_EQ(gap(24, {{0, 8, left}}), "has 24 elements, but 8 are stored");
  EXPECT_EQ(gap(24, {{0, 8, left}, {0, 20, wide}}), "has pieces that overlap");
  EXPECT_EQ(gap(24, {{0, 24}, {0, 8, left}}), "has pieces that overlap");
}

// Comparing all pairs of this many would be refused as too much work.
TEST(Region, ManyPiecesOfAGridAreCutApart) {
  constexpr int64_t kSide = 60, kPart = 3;
  std::vector<Region> regions;
  for (int64_t i = 0; i < kSide * kSide; ++i) {
    // 7 and kSide * kSide have no common factor: each piece comes once, in no order.
    const int64_t piece = 7 * i % (kSide * kSide);
    const int64_t row = piece / kSide * kPart, column = piece % kSide * kPart;
    const Box box{{kSide * kPart, kSide * kPart}, {row, column}, {kPart, kPart}};
    regions.push_back({0, kPart * kPart, box});
  }
  std::vector<const Region*> pointers;
  for (const Region& region : regions) pointers.push_back(&region);
  constexpr int64_t kNumel = kSide * kSide * kPart * kPart;
  EXPECT_EQ(describe_gap(kNumel, pointers), "");
  regions[100].box->offset[0] += 1;
  EXPECT_EQ(describe_gap(kNumel, pointers), "has pieces that overlap");
}

}  // namespace tessera::region_test
