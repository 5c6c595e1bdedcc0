#include <gtest/gtest.h>
#include <tessera/tensor/placement.h>

#include "support/models.h"

namespace tessera::placement_test {

using testing::expect_error;

TEST(Placement, SL_22_IsEqualByKindAndValue) {
  EXPECT_EQ(Placement(Shard{1}), Placement(Shard{1}));
  EXPECT_NE(Placement(Shard{1}), Placement(Shard{0}));
  EXPECT_NE(Placement(Shard{0}), Placement(Replicate{}));
  EXPECT_NE(Placement(Replicate{}), Placement(Partial{}));
  EXPECT_EQ(Placement(Partial{}), Placement(Partial{PartialOp::kSum}));
  EXPECT_NE(Placement(Partial{PartialOp::kAvg}), Placement(Partial{PartialOp::kSum}));
  EXPECT_EQ(Placement(), Placement(Replicate{}));
  EXPECT_EQ(Placements({Shard{0}, Replicate{}}), Placements({Shard{0}, Replicate{}}));
  EXPECT_NE(Placements({Shard{0}, Replicate{}}), Placements({Replicate{}, Shard{0}}));
  EXPECT_EQ(Placement(Shard{1, 1}), Placement(Shard{1}));
  EXPECT_NE(Placement(Shard{1, 3}), Placement(Shard{1}));
  EXPECT_NE(Placement(Shard{1, 3}), Placement(Shard{1, 2}));
}

TEST(Placement, KnowsItsKind) {
  const Placement shard = Shard{1}, replicate = Replicate{}, partial = Partial{PartialOp::kMax};
  for (const auto& [placement, kind] :
       {std::pair(shard, 0), std::pair(replicate, 1), std::pair(partial, 2)}) {
    EXPECT_EQ(is_shard(placement), kind == 0);
    EXPECT_EQ(is_shard(placement, 1), kind == 0);
    EXPECT_FALSE(is_shard(placement, 0));
    EXPECT_FALSE(is_split(placement));
    EXPECT_EQ(is_replicate(placement), kind == 1);
    EXPECT_EQ(is_partial(placement), kind == 2);
  }
  const Placement split = Shard{1, 3};
  EXPECT_TRUE(is_shard(split) && is_shard(split, 1) && is_split(split));
  EXPECT_FALSE(is_shard(split, 0));
}

TEST(Placement, PrintsAsItIsWritten) {
  EXPECT_EQ(to_string(Placement(Shard{0})), "Shard(0)");
  EXPECT_EQ(to_string(Placement(Shard{-2})), "Shard(-2)");
  EXPECT_EQ(to_string(Placement(Shard{0, 3})), "Shard(0, split_factor=3)");
  EXPECT_EQ(to_string(Placement(Replicate{})), "Replicate");
  const std::vector<std::pair<PartialOp, std::string>> names = {
      {PartialOp::kSum, "sum"}, {PartialOp::kAvg, "avg"},   {PartialOp::kMax, "max"},
      {PartialOp::kMin, "min"}, {PartialOp::kProd, "prod"}, {PartialOp::kAny, "any"},
      {PartialOp::kAll, "all"}, {PartialOp::kNorm, "norm"}};
  for (const auto& [op, name] : names)
    EXPECT_EQ(to_string(Placement(Partial{op})), "Partial(" + name + ")");
  EXPECT_EQ(to_string(Placements{}), "[]");
  EXPECT_EQ(to_string(Placements{Shard{0}, Replicate{}}), "[Shard(0), Replicate]");
  EXPECT_EQ(to_string(Placements{Replicate{}, Partial{PartialOp::kMax}, Shard{2}}),
            "[Replicate, Partial(max), Shard(2)]");
}

TEST(Normalize, SL_23_FillsUpWithReplicate) {
  EXPECT_EQ(normalize({}, 2, 3), Placements({Replicate{}, Replicate{}}));
  EXPECT_EQ(normalize({Shard{1}}, 3, 2), Placements({Shard{1}, Replicate{}, Replicate{}}));
  EXPECT_EQ(normalize({Partial{}, Shard{0}}, 2, 1), Placements({Partial{}, Shard{0}}));
  EXPECT_EQ(normalize({Replicate{}, Partial{PartialOp::kMin}}, 2, 0),
            Placements({Replicate{}, Partial{PartialOp::kMin}}));
}

TEST(Normalize, SL_23_RefusesMorePlacementsThanMeshDims) {
  EXPECT_THROW(normalize({Replicate{}, Replicate{}}, 1, 2), c10::ValueError);
  expect_error(
      [] {
        normalize({Shard{0}, Replicate{}, Partial{}}, 2, 1);
      },
      {"[normalize]", "up to 2, got 3", "[Shard(0), Replicate, Partial(sum)]"});
}

TEST(Normalize, SL_26_CountsNegativeDimsFromTheEnd) {
  for (int64_t ndim = 1; ndim <= 4; ++ndim) {
    for (int64_t dim = -ndim; dim < ndim; ++dim)
      EXPECT_EQ(normalize({Shard{dim}}, 1, ndim), Placements({Shard{(dim + ndim) % ndim}}));
  }
  EXPECT_EQ(normalize({Shard{-1}, Shard{-1}}, 2, 2), Placements({Shard{1}, Shard{1}}));
}

TEST(Normalize, SL_26_RefusesADimThatTheTensorDoesNotHave) {
  for (const int64_t dim : {int64_t{2}, int64_t{5}, int64_t{-3}, INT64_MIN, INT64_MAX})
    EXPECT_THROW(normalize({Shard{dim}}, 1, 2), c10::ValueError) << dim;
  expect_error(
      [] {
        normalize({Replicate{}, Shard{5}}, 2, 2);
      },
      {"[normalize]", "-2 to 1", "Shard(5)", "mesh dim 1", "2 dims"});
  for (const int64_t dim : {0, -1}) {
    EXPECT_THROW(normalize({Shard{dim}}, 1, 0), c10::ValueError);
    expect_error([&] { normalize({Shard{dim}}, 1, 0); },
                 {"[normalize]", "without dims", "mesh dim 0", "0 dims"});
  }
}

TEST(Normalize, RefusesASplitFactorBelowOne) {
  EXPECT_EQ(normalize({Shard{-1, 3}}, 1, 2), Placements({Shard{1, 3}}));
  for (const int64_t factor : {int64_t{0}, int64_t{-2}, INT64_MIN}) {
    EXPECT_THROW(normalize({Shard{0, factor}}, 1, 2), c10::ValueError) << factor;
    expect_error(
        [&] {
          normalize({Replicate{}, Shard{-1, factor}}, 2, 2);
        },
        {"[normalize]", "at least 1", "split_factor=" + std::to_string(factor), "mesh dim 1"});
  }
}

}  // namespace tessera::placement_test
