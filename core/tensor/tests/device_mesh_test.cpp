// The array of ranks: all that a mesh answers without communication.
#include <gtest/gtest.h>
#include <tessera/tensor/device_mesh.h>
#include <torch/torch.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "support/models.h"

namespace tessera::device_mesh_test {

using testing::expect_error;
using Ranks = std::vector<int>;
using Sizes = std::vector<int64_t>;
using Names = std::vector<std::string>;
using testing::on_test_device;

TEST(DeviceMesh, SL_20_IsAnArrayOfRanksWithNames) {
  run_world(4, [](World&) {
    const DeviceMesh mesh({2, 2}, {2, 0, 3, 1}, {"dp", "tp"});
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.shape(), Sizes({2, 2}));
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.size(0), 2);
    EXPECT_EQ(mesh.size(-1), 2);
    EXPECT_EQ(mesh.ranks(), Ranks({2, 0, 3, 1}));
    EXPECT_EQ(mesh.dim_names(), Names({"dp", "tp"}));
    EXPECT_EQ(mesh.dim("dp"), 0);
    EXPECT_EQ(mesh.dim("tp"), 1);
    EXPECT_EQ(mesh.to_string(), "DeviceMesh([2, 2], ranks [2, 0, 3, 1], dims [dp, tp])");
  });
}

TEST(DeviceMesh, SL_20_NamesItsDimsIfNobodyDoes) {
  run_world(3, [](World&) {
    EXPECT_EQ(DeviceMesh({1, 3, 1}, {0, 1, 2}).dim_names(), Names({"d0", "d1", "d2"}));
    EXPECT_EQ(DeviceMesh({2}, {2, 1}).to_string(), "DeviceMesh([2], ranks [2, 1], dims [d0])");
  });
}

// A vector<int> of two pointers to characters would be a range of memory.
template <class Mesh>
constexpr bool takes_names_for_ranks = requires {
  Mesh({2, 2}, {"dp", "tp"});
}
|| requires(World& world) { Mesh(world, {2, 2}, {"dp", "tp"}); };

TEST(DeviceMesh, NamesAreNotTakenForRanks) {
  static_assert(!takes_names_for_ranks<DeviceMesh>);
  run_world(1, [](World&) { EXPECT_EQ(DeviceMesh({1}, {0}).ranks(), Ranks({0})); });
}

TEST(DeviceMesh, OverWorldHasAllRanksInTheirOrder) {
  for (const int size : {1, 2, 3, 4}) {
    run_world(size, [size](World& world) {
      Ranks all(size);
      std::iota(all.begin(), all.end(), 0);
      const auto line = DeviceMesh::over_world();
      EXPECT_EQ(line.shape(), Sizes({size}));
      EXPECT_EQ(line.ranks(), all);
      EXPECT_EQ(line.coordinate(), Sizes({world.rank()}));
      EXPECT_EQ(DeviceMesh::over_world(world), line);
      const auto column = DeviceMesh::over_world({size, 1}, {"a", "b"});
      EXPECT_EQ(column.shape(), Sizes({size, 1}));
      EXPECT_EQ(column.dim_names(), Names({"a", "b"}));
      EXPECT_EQ(column.ranks(), all);
    });
  }
}

TEST(DeviceMesh, StandsOnTheWorldThatItIsGiven) {
  run_world(4, [](World& outer) {
    const World inner = init(c10::make_intrusive<c10d::PrefixStore>(
                                 "half " + std::to_string(outer.rank() / 2), outer.store()),
                             outer.rank() % 2, 2, {.timeout = std::chrono::seconds(30)});
    EXPECT_EQ(DeviceMesh::over_world().size(), 2);
    EXPECT_EQ(DeviceMesh::over_world(outer, {2, 2}).coordinate(),
              Sizes({outer.rank() / 2, outer.rank() % 2}));
    EXPECT_EQ(DeviceMesh(outer, {2}, {3, 1}).is_member(), outer.rank() % 2 == 1);
    EXPECT_EQ(DeviceMesh({1}, {1}).is_member(), inner.rank() == 1);
    EXPECT_THROW(DeviceMesh({2}, {3, 1}), c10::ValueError);
  });
}

TEST(DeviceMesh, KnowsWhereRanksStand) {
  run_world(4, [](World& world) {
    const DeviceMesh mesh({2, 2}, {2, 0, 3, 1});
    const std::vector<Sizes> places = {{0, 1}, {1, 1}, {0, 0}, {1, 0}};
    EXPECT_EQ(mesh.coordinate(), places[world.rank()]);
    EXPECT_TRUE(mesh.is_member());
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_TRUE(mesh.contains(rank));
      EXPECT_EQ(mesh.coordinate_of(rank), places[rank]);
      EXPECT_EQ(mesh.rank_at(places[rank]), rank);
    }
    EXPECT_FALSE(mesh.contains(4));
    EXPECT_FALSE(mesh.contains(-1));
    EXPECT_THROW(mesh.coordinate_of(4), c10::ValueError);
    for (const Sizes& place : {Sizes{}, Sizes{0}, Sizes{0, 0, 0}, Sizes{2, 0}, Sizes{0, -1}})
      EXPECT_THROW(mesh.rank_at(place), c10::ValueError) << place;
    expect_error([&] { mesh.rank_at({0, 2}); }, {"[rank_at]", "below [2, 2]", "got [0, 2]"});
  });
}

TEST(DeviceMesh, SL_21_IsEqualByShapeAndRanks) {
  run_world(4, [](World&) {
    const DeviceMesh mesh({2, 2}, {0, 1, 2, 3}, {"dp", "tp"});
    EXPECT_EQ(mesh, DeviceMesh::over_world({2, 2}));
    const DeviceMesh copy = mesh;
    EXPECT_EQ(copy, mesh);
    EXPECT_FALSE(mesh == DeviceMesh({4}, {0, 1, 2, 3}));
    EXPECT_FALSE(mesh == DeviceMesh({4, 1}, {0, 1, 2, 3}));
    EXPECT_FALSE(mesh == DeviceMesh({2, 2}, {0, 2, 1, 3}));
    EXPECT_FALSE(DeviceMesh({2}, {0, 1}) == DeviceMesh({2}, {1, 0}));
  });
}

TEST(DeviceMesh, SL_21_MayLeaveThisRankOut) {
  run_world(4, [](World& world) {
    const DeviceMesh mesh({1, 2}, {3, 1}, {"pp", "tp"});
    const bool member = world.rank() % 2 == 1;
    EXPECT_EQ(mesh.shape(), Sizes({1, 2}));
    EXPECT_EQ(mesh.is_member(), member);
    EXPECT_EQ(mesh.coordinate().has_value(), member);
    EXPECT_EQ(mesh.coordinate_of(1), Sizes({0, 1}));
    EXPECT_EQ(mesh.select(1, 0).ranks(), Ranks({3}));
    EXPECT_EQ(mesh.with_first("tp").shape(), Sizes({2, 1}));
    if (member) {
      EXPECT_EQ(mesh.sub_mesh("tp").ranks(), Ranks({3, 1}));
      return;
    }
    EXPECT_THROW(mesh.sub_mesh("tp"), c10::ValueError);
    EXPECT_THROW(mesh.process_group(), c10::ValueError);
    EXPECT_THROW(mesh.process_group(0), c10::ValueError);
    for (const std::string f : {"[process_group]", "[sub_mesh]"})
      expect_error([&] { f[1] == 'p' ? (void)mesh.process_group(1) : (void)mesh.sub_mesh("pp"); },
                   {f, "must be in the mesh", "rank " + std::to_string(world.rank()),
                    "DeviceMesh([1, 2], ranks [3, 1], dims [pp, tp])"});
  });
}

TEST(DeviceMesh, SL_21_SelectTakesOneIndexOfADim) {
  run_world(4, [](World&) {
    const DeviceMesh mesh({2, 2}, {0, 1, 2, 3}, {"dp", "tp"});
    const auto expect_line = [](const DeviceMesh& line, const Ranks& ranks, const char* name) {
      EXPECT_EQ(line.shape(), Sizes({static_cast<int64_t>(ranks.size())}));
      EXPECT_EQ(line.ranks(), ranks);
      EXPECT_EQ(line.dim_names(), Names({name}));
    };
    expect_line(mesh.select(0, 0), {0, 1}, "tp");
    expect_line(mesh.select(0, 1), {2, 3}, "tp");
    expect_line(mesh.select(1, 0), {0, 2}, "dp");
    expect_line(mesh.select(-1, -1), {1, 3}, "dp");
    // One dim is left, of one rank.
    expect_line(mesh.select(0, 1).select(0, 1), {3}, "tp");
    expect_line(mesh.select(0, 1).select(0, 0).select(0, 0), {2}, "tp");
    for (const int64_t dim : {2, -3}) EXPECT_THROW(mesh.select(dim, 0), c10::ValueError);
    for (const int64_t index : {2, -3}) EXPECT_THROW(mesh.select(0, index), c10::ValueError);
    expect_error([&] { mesh.select(1, 7); }, {"[select]", "mesh dim 1", "-2 to 1, got 7"});
  });
}

TEST(DeviceMesh, SubMeshIsThePartOfThisRank) {
  run_world(4, [](World& world) {
    const DeviceMesh mesh({2, 1, 2}, {3, 1, 0, 2}, {"pp", "dp", "tp"});
    const bool front = world.rank() % 2 == 1;
    EXPECT_EQ(mesh.sub_mesh("tp").ranks(), front ? Ranks({3, 1}) : Ranks({0, 2}));
    EXPECT_EQ(mesh.sub_mesh("pp").ranks(), world.rank() % 3 == 0 ? Ranks({3, 0}) : Ranks({1, 2}));
    EXPECT_EQ(mesh.sub_mesh("dp").ranks(), Ranks({world.rank()}));
    EXPECT_EQ(mesh.sub_mesh("dp").dim_names(), Names({"dp"}));
    const auto two = mesh.sub_mesh({"dp", "tp"});
    EXPECT_EQ(two.shape(), Sizes({1, 2}));
    EXPECT_EQ(two.ranks(), front ? Ranks({3, 1}) : Ranks({0, 2}));
    // The dims have the order of the names.
    const auto turned = mesh.sub_mesh({"tp", "pp"});
    EXPECT_EQ(turned.shape(), Sizes({2, 2}));
    EXPECT_EQ(turned.ranks(), Ranks({3, 0, 1, 2}));
    EXPECT_EQ(turned.dim_names(), Names({"tp", "pp"}));
    EXPECT_EQ(mesh.sub_mesh(mesh.dim_names()), mesh);
  });
}

TEST(DeviceMesh, SubMeshRefusesNamesThatItDoesNotHave) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world({1, 2}, {"dp", "tp"});
    EXPECT_THROW(mesh.sub_mesh("ep"), c10::ValueError);
    EXPECT_THROW(mesh.dim("ep"), c10::ValueError);
    EXPECT_THROW(mesh.sub_mesh(Names{}), c10::ValueError);
    EXPECT_THROW(mesh.sub_mesh({"tp", "tp"}), c10::ValueError);
    expect_error([&] { mesh.dim("ep"); }, {"[dim]", "one of dp, tp", "got ep"});
    expect_error([&] { mesh.sub_mesh({"tp", "x"}); }, {"[sub_mesh]", "one of dp, tp", "got x"});
    expect_error([&] { mesh.with_first("y"); }, {"[with_first]", "one of dp, tp", "got y"});
    EXPECT_THROW(mesh.size(2), c10::ValueError);
    expect_error([&] { mesh.process_group(-3); }, {"[process_group]", "-2 to 1, got -3"});
  });
}

TEST(DeviceMesh, SL_21_WithFirstMovesADimToTheFront) {
  run_world(4, [](World&) {
    const DeviceMesh mesh({2, 1, 2}, {0, 1, 2, 3}, {"a", "b", "c"});
    const auto moved = mesh.with_first("c");
    EXPECT_EQ(moved.shape(), Sizes({2, 2, 1}));
    EXPECT_EQ(moved.ranks(), Ranks({0, 2, 1, 3}));
    EXPECT_EQ(moved.dim_names(), Names({"c", "a", "b"}));
    EXPECT_EQ(mesh.with_first("a"), mesh);
    const auto part = mesh.with_first("c", 1);
    EXPECT_EQ(part, moved.select(0, 1));
    EXPECT_EQ(part.shape(), Sizes({2, 1}));
    EXPECT_EQ(part.ranks(), Ranks({1, 3}));
    EXPECT_EQ(part.dim_names(), Names({"a", "b"}));
    EXPECT_THROW(mesh.with_first("c", 2), c10::ValueError);
  });
}

TEST(DeviceMesh, SL_20_RefusesWrongArgumentsOnEveryRank) {
  run_world(4, [](World& world) {
    const auto refuses = [](const Sizes& shape, const Ranks& ranks, const Names& names,
                            const std::vector<std::string>& parts) {
      EXPECT_THROW(DeviceMesh(shape, ranks, names), c10::ValueError);
      expect_error([&] { DeviceMesh(shape, ranks, names); }, parts);
    };
    refuses({2}, {1, 1}, {}, {"[DeviceMesh]", "distinct", "got 1 twice"});
    refuses({2}, {0, 4}, {}, {"0 to 3", "got 4"});
    refuses({2}, {-1, 0}, {}, {"0 to 3", "got -1"});
    refuses({3}, {0, 1}, {}, {"one rank for each place", "[3]", "2 ranks"});
    refuses({2, 2}, {0, 1, 2}, {}, {"[2, 2]", "3 ranks"});
    refuses({2}, {0, 1, 2, 3}, {}, {"[2]", "4 ranks"});
    refuses({2}, {}, {}, {"[2]", "0 ranks"});
    refuses({int64_t{1} << 62, 4}, {0, 1, 2, 3}, {}, {"4 ranks"});
    refuses({}, {}, {}, {"a dim at least"});
    refuses({}, {0}, {}, {"a dim at least"});
    refuses({0}, {}, {}, {"at least 1", "[0]"});
    refuses({-1, -2}, {0, 1}, {}, {"at least 1", "[-1, -2]"});
    refuses({2}, {0, 1}, {"a", "b"}, {"each mesh dim", "expected 1", "[a, b]"});
    refuses({1, 2}, {0, 1}, {"a"}, {"expected 2", "[a]"});
    refuses({1, 2}, {0, 1}, {"a", "a"}, {"`dim_names` must be distinct", "[a, a]"});
    EXPECT_THROW(DeviceMesh::over_world({3}), c10::ValueError);
    EXPECT_THROW(DeviceMesh(world, {2}, {0, 5}), c10::ValueError);
    // Nothing was sent, and no rank waits.
    world.process_group()->barrier({.subject = "after"});
  });
}

TEST(DeviceMesh, NeedsNoWorldForOneRank) {
  const auto mesh = DeviceMesh::over_world();
  EXPECT_EQ(mesh.ranks(), Ranks({0}));
  EXPECT_EQ(mesh.coordinate(), Sizes({0}));
  EXPECT_EQ(DeviceMesh({1, 1}, {0}, {"dp", "tp"}).sub_mesh("tp"), mesh);
  EXPECT_THROW(DeviceMesh({1}, {1}), c10::ValueError);
  const auto number = on_test_device(torch::ones({3}));
  mesh.process_group(0)->all_reduce(number, ReduceOp::kSum, {.subject = "one"})->wait();
  mesh.process_group()->all_reduce(number, ReduceOp::kSum, {.subject = "one"})->wait();
  EXPECT_TRUE(number.eq(1).all().item<bool>());
  EXPECT_EQ(mesh.process_group(0), mesh.process_group());
}

}  // namespace tessera::device_mesh_test
