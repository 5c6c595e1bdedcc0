#include "tensor/chunks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::chunks_test {

using Sizes = std::vector<int64_t>;

// The part of `tensor` on the rank at `coordinate`, cut by torch::chunk.
torch::Tensor chunked(torch::Tensor tensor, const Placements& placements, const Sizes& mesh_shape,
                      const Sizes& coordinate) {
  for (size_t i = 0; i < placements.size(); ++i) {
    const auto* shard = std::get_if<Shard>(&placements[i]);
    if (!shard) continue;
    const auto parts = tensor.chunk(mesh_shape[i], shard->dim);
    tensor = coordinate[i] < static_cast<int64_t>(parts.size()) ? parts[coordinate[i]]
                                                                : tensor.narrow(shard->dim, 0, 0);
  }
  return tensor;
}

torch::Tensor boxed(torch::Tensor tensor, const std::vector<Range>& box) {
  for (size_t dim = 0; dim < box.size(); ++dim)
    tensor = tensor.slice(static_cast<int64_t>(dim), box[dim].begin, box[dim].end);
  return tensor;
}

TEST(Chunk, SL_24_IsThatOfTorchChunk) {
  for (int64_t size = 0; size <= 7; ++size) {
    const auto whole = torch::arange(size);
    for (int64_t parts = 1; parts <= 4; ++parts) {
      int64_t next = 0;
      for (int64_t index = 0; index < parts; ++index) {
        const Range range = chunk(size, parts, index);
        EXPECT_EQ(range.begin, next) << size << " over " << parts;
        EXPECT_LE(range.begin, range.end);
        EXPECT_TRUE(whole.slice(0, range.begin, range.end)
                        .equal(chunked(whole, {Shard{0}}, {parts}, {index})))
            << index << " of " << size << " over " << parts;
        next = range.end;
      }
      EXPECT_EQ(next, size);
    }
  }
}

TEST(Chunk, SL_25_LeavesNothingToRanksBehindTheLastRow) {
  EXPECT_EQ(chunk(5, 2, 0), Range({0, 3}));
  EXPECT_EQ(chunk(5, 2, 1), Range({3, 5}));
  EXPECT_EQ(chunk(1, 2, 1), Range({1, 1}));
  // Two rows each, so that the fourth of four ranks gets none of five.
  EXPECT_EQ(chunk(5, 4, 2), Range({4, 5}));
  EXPECT_EQ(chunk(5, 4, 3), Range({5, 5}));
  EXPECT_EQ(chunk(0, 3, 0), Range({0, 0}));
  EXPECT_EQ(chunk(1, 3, 2).size(), 0);
}

// Calls `f` at each coordinate of a mesh.
template <class F>
void for_each_place(const Sizes& mesh_shape, F&& f) {
  int64_t count = 1;
  for (const int64_t size : mesh_shape) count *= size;
  Sizes place(mesh_shape.size());
  for (int64_t i = 0; i < count; ++i) {
    int64_t index = i;
    for (size_t d = mesh_shape.size(); d-- > 0; index /= mesh_shape[d])
      place[d] = index % mesh_shape[d];
    f(place);
  }
}

TEST(LocalBox, IsWhatNestedChunksLeave) {
  const std::vector<Placement> kinds = {Shard{0}, Shard{1}, Replicate{}, Partial{}};
  for (const Sizes& mesh_shape : {Sizes{1, 1}, Sizes{2, 2}, Sizes{2, 3}, Sizes{3, 2}, Sizes{4, 3}})
    for (int64_t rows = 0; rows <= 7; ++rows)
      for (const int64_t columns : {0, 1, 5})
        for (const Placement& first : kinds)
          for (const Placement& second : kinds) {
            const auto whole = torch::arange(rows * columns).view({rows, columns});
            const Placements placements = {first, second};
            auto seen = torch::zeros({rows, columns}, torch::kLong);
            for_each_place(mesh_shape, [&](const Sizes& place) {
              const auto expected = chunked(whole, placements, mesh_shape, place);
              const auto box = local_box(whole.sizes(), placements, mesh_shape, place);
              ASSERT_EQ(box.size(), 2);
              EXPECT_TRUE(boxed(whole, box).equal(expected))
                  << to_string(placements) << " of " << whole.sizes() << " on " << mesh_shape
                  << " at " << place;
              EXPECT_EQ(local_sizes(whole.sizes(), placements, mesh_shape, place),
                        expected.sizes().vec());
              boxed(seen, box).add_(1);
            });
            // Each element lies once on each combination of the mesh dims that don't cut.
            int64_t copies = 1;
            for (size_t i = 0; i < 2; ++i) copies *= is_shard(placements[i]) ? 1 : mesh_shape[i];
            EXPECT_TRUE(seen.eq(copies).all().item<bool>()) << to_string(placements);
          }
}

TEST(LocalBox, TheOuterMeshDimCutsFirst) {
  // 5 over 2 is [0, 3), [3, 5); the second mesh dim cuts these.
  const Placements both = {Shard{0}, Shard{0}};
  const std::vector<Range> expected = {{0, 2}, {2, 3}, {3, 4}, {4, 5}};
  for (int64_t i = 0; i < 4; ++i)
    EXPECT_EQ(local_box({5}, both, {2, 2}, {i / 2, i % 2})[0], expected[i]) << i;
}

TEST(LocalBox, OfATensorWithoutDimsIsEmpty) {
  EXPECT_TRUE(local_box({}, {Replicate{}}, {2}, {1}).empty());
  EXPECT_TRUE(local_sizes({}, {Partial{}}, {2}, {0}).empty());
}

TEST(LocalSizes, OfASplitDimAreThoseOfEqualParts) {
  for (int64_t i = 0; i < 6; ++i)
    EXPECT_EQ(local_sizes({18, 5}, {Shard{0, 3}, Shard{1}}, {3, 2}, {i / 2, i % 2}),
              (std::vector<int64_t>{6, i % 2 == 0 ? 3 : 2}));
  EXPECT_EQ(without_splits({Shard{1, 3}, Partial{}, Shard{0}}),
            Placements({Shard{1}, Partial{}, Shard{0}}));
}

}  // namespace tessera::chunks_test
