// The process groups of a mesh: their making, sharing and ending.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/tensor/device_mesh.h>
#include <torch/torch.h>

#include <atomic>
#include <cmath>
#include <future>
#include <mutex>
#include <thread>

#include "support/models.h"

namespace tessera::mesh_process_group_test {

using namespace std::chrono_literals;
using testing::expect_error;
using Ranks = std::vector<int>;
using testing::on_test_device;

constexpr CollectiveTag kTag{.subject = "line"};

double sum_over(ProcessGroup& process_group, double value) {
  const auto number = on_test_device(torch::full({1}, value, torch::kDouble));
  process_group.all_reduce(number, ReduceOp::kSum, kTag)->wait();
  return number.item<double>();
}

// The world's ranks in the order of the process group.
Ranks members(ProcessGroup& process_group, int world_rank) {
  std::vector<int64_t> bounds(process_group.size() + 1);
  for (int r = 0; r <= process_group.size(); ++r) bounds[r] = r;
  const auto flat = on_test_device(torch::empty({process_group.size()}, torch::kInt));
  process_group
      .all_gather(flat, on_test_device(torch::full({1}, world_rank, torch::kInt)), bounds, kTag)
      ->wait();
  const auto ranks = flat.cpu();
  return {ranks.const_data_ptr<int>(), ranks.const_data_ptr<int>() + ranks.numel()};
}

TEST(MeshProcessGroup, HasTheRanksOfTheLineInItsOrder) {
  run_world(4, [](World& world) {
    for (const auto& [shape, ranks] :
         {std::pair(std::vector<int64_t>{2, 2}, Ranks{0, 1, 2, 3}),
          std::pair(std::vector<int64_t>{2, 2}, Ranks{3, 0, 1, 2}),
          std::pair(std::vector<int64_t>{4}, Ranks{2, 3, 1, 0}),
          std::pair(std::vector<int64_t>{1, 4}, Ranks{0, 1, 2, 3}),
          std::pair(std::vector<int64_t>{2, 1, 2}, Ranks{0, 2, 1, 3})}) {
      const DeviceMesh mesh(shape, ranks);
      for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
        const Ranks line = mesh.sub_mesh(mesh.dim_names()[dim]).ranks();
        const auto& process_group = mesh.process_group(dim);
        EXPECT_EQ(process_group->size(), mesh.size(dim));
        EXPECT_EQ(process_group->rank(), (*mesh.coordinate())[dim]);
        if (mesh.size(dim) > 1) {
          EXPECT_EQ(process_group->timeout(), world.process_group()->timeout());
        }
        EXPECT_EQ(members(*process_group, world.rank()), line) << mesh.to_string();
        EXPECT_EQ(mesh.process_group(dim - mesh.ndim()), process_group);
      }
      EXPECT_EQ(members(*mesh.process_group(), world.rank()), ranks);
    }
  });
}

TEST(MeshProcessGroup, ServesBothDimsOfA2DMeshAtOnce) {
  run_world(4, [](World& world) {
    const auto mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
    const auto dp = counting_process_group(mesh.process_group(0));
    const auto tp = counting_process_group(mesh.process_group(1));
    for (int round = 0; round < 10; ++round) {
      const auto a =
          on_test_device(torch::full({3000}, std::pow(10.0, world.rank()), torch::kDouble));
      const auto b = a.clone();
      const auto across = dp->all_reduce(a, ReduceOp::kSum, kTag);
      const auto along = tp->all_reduce(b, ReduceOp::kSum, kTag);
      along->wait();
      across->wait();
      EXPECT_TRUE(a.eq(world.rank() % 2 == 0 ? 101 : 1010).all().item<bool>());
      EXPECT_TRUE(b.eq(world.rank() < 2 ? 11 : 1100).all().item<bool>());
    }
    for (const auto& counted : {dp, tp}) {
      EXPECT_EQ(counted->counts().all_reduce.calls, 10);
      EXPECT_EQ(counted->counts().calls(), 10);
    }
  });
}

TEST(MeshProcessGroup, IsOneForEqualLines) {
  run_world(4, [](World& world) {
    const DeviceMesh mesh({2, 2}, {0, 1, 2, 3}, {"dp", "tp"});
    const auto& dp = mesh.process_group(0);
    const auto& tp = mesh.process_group(1);
    EXPECT_EQ(mesh.process_group(1), tp);
    EXPECT_EQ(DeviceMesh(mesh).process_group(1), tp);
    EXPECT_EQ(mesh.sub_mesh("tp").process_group(0), tp);
    EXPECT_EQ(mesh.sub_mesh("tp").process_group(), tp);
    EXPECT_EQ(mesh.with_first("tp").process_group(0), tp);
    EXPECT_EQ(mesh.with_first("tp").process_group(1), dp);
    EXPECT_EQ(mesh.select(0, world.rank() / 2).process_group(0), tp);
    EXPECT_EQ(DeviceMesh::over_world({2, 2}).process_group(0), dp);
    const Ranks row = world.rank() < 2 ? Ranks{0, 1} : Ranks{2, 3};
    EXPECT_EQ(DeviceMesh({2}, row).process_group(0), tp);
    // Another order, or another maker, gives another process group.
    const DeviceMesh turned({2}, {row[1], row[0]});
    EXPECT_NE(turned.process_group(0), tp);
    EXPECT_NE(turned.process_group(0)->rank(), tp->rank());
    EXPECT_NE(world.new_process_group(row), tp);
    EXPECT_EQ(mesh.select(0, world.rank() / 2).select(0, world.rank() % 2).process_group(),
              DeviceMesh({1}, {world.rank()}).process_group());
  });
}

TEST(MeshProcessGroup, OfAllRanksIsThatOfTheWorld) {
  run_world(3, [](World& world) {
    const auto before = DeviceMesh::over_world();
    EXPECT_EQ(before.process_group(0), world.process_group());
    const auto counting = counting_process_group(world.process_group());
    world.set_process_group(counting);
    for (const auto& mesh : {before, DeviceMesh::over_world(), DeviceMesh::over_world({1, 3})}) {
      EXPECT_EQ(mesh.process_group(), counting);
      EXPECT_EQ(mesh.process_group(-1), counting);
    }
    EXPECT_EQ(sum_over(*before.process_group(0), 2), 6);
    EXPECT_EQ(counting->counts().all_reduce.calls, 1);
    const DeviceMesh turned({3}, {2, 1, 0});
    EXPECT_NE(turned.process_group(), counting);
    EXPECT_EQ(sum_over(*turned.process_group(), 2), 6);
    EXPECT_EQ(counting->counts().calls(), 1);
  });
}

// Collective over the line only: the other ranks take no part.
TEST(MeshProcessGroup, NeedsTheRanksOfTheLineOnly) {
  std::atomic<int> done{0};
  run_world(4, [&](World& world) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    const DeviceMesh others({2}, {1, 3});
    if (world.rank() == 1 || world.rank() == 2) {
      EXPECT_EQ(mesh.ndim() + others.ndim(), 3);
      while (done < 1) std::this_thread::sleep_for(1ms);
    }
    if (world.rank() % 3 == 0) {
      const DeviceMesh corners({2}, {3, 0});
      EXPECT_EQ(sum_over(*corners.process_group(0), 1.0 + world.rank()), 5);
      ++done;
    }
    EXPECT_EQ(sum_over(*mesh.process_group(1), 1), 2);
    if (others.is_member()) {
      EXPECT_EQ(sum_over(*others.process_group(), 1), 2);
    }
  });
}

// Each rank has two threads, each of which asks for another dim of the mesh. The first thread
// differs between ranks, so that each waits for a rank whose other thread came first.
TEST(MeshProcessGroup, IsMadeByThreadsInAnyOrder) {
  run_world(4, [](World& world) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    const int64_t first = (world.rank() / 2 + world.rank()) % 2;
    auto early = std::async(std::launch::async, [&] {
      testing::take_test_device(world.rank());
      return sum_over(*mesh.process_group(first), 1);
    });
    std::this_thread::sleep_for(200ms);
    EXPECT_EQ(sum_over(*mesh.process_group(1 - first), 1), 2);
    EXPECT_EQ(early.get(), 2);
  });
}

TEST(MeshProcessGroup, IsMadeOnceByThreadsOfARank) {
  run_world(2, [](World&) {
    const DeviceMesh mesh({2}, {1, 0});
    std::vector<std::future<ProcessGroupPtr>> asked;
    for (int i = 0; i < 4; ++i)
      asked.push_back(std::async(std::launch::async, [&] { return mesh.process_group(0); }));
    const ProcessGroupPtr made = asked[0].get();
    for (size_t i = 1; i < asked.size(); ++i) EXPECT_EQ(asked[i].get(), made);
    EXPECT_EQ(sum_over(*made, 1), 2);
  });
}

TEST(MeshProcessGroup, SaysThatARankDoesNotComeAndMayBeTriedAgain) {
  std::atomic<bool> failed{false};
  run_world(
      2,
      [&](World& world) {
        const DeviceMesh mesh({2}, {1, 0});
        if (world.rank() == 0) {
          EXPECT_THROW(mesh.process_group(0), c10::DistNetworkError);
          failed = true;
          expect_error([&] { mesh.process_group(0); },
                       {"[process_group]", "rank 0 of ranks 1, 0", "in vain for rank 1",
                        "process_group([1, 0])"});
        } else {
          while (!failed) std::this_thread::sleep_for(5ms);
        }
      },
      1s);
}

TEST(MeshProcessGroup, IsClosedWithTheWorld) {
  std::mutex mutex;
  std::vector<DeviceMesh> meshes;
  run_world(4, [&](World& world) {
    const DeviceMesh mesh({2, 2}, {0, 1, 2, 3});
    EXPECT_EQ(sum_over(*mesh.process_group(1), 1), 2);
    EXPECT_EQ(sum_over(*mesh.process_group(), 1), 4);
    const std::lock_guard lock(mutex);
    meshes.push_back(mesh);
    meshes.push_back(DeviceMesh({1, 4}, {3, 2, 1, 0}));
  });
  ASSERT_EQ(meshes.size(), 8);
  for (size_t i = 0; i < meshes.size(); i += 2) {
    const DeviceMesh &used = meshes[i], &unused = meshes[i + 1];
    EXPECT_THROW(sum_over(*used.process_group(1), 1), c10::DistBackendError);
    EXPECT_THROW(sum_over(*used.process_group(), 1), c10::DistBackendError);
    EXPECT_THROW(used.process_group(0), c10::DistBackendError);
    EXPECT_THROW(used.sub_mesh("d0").process_group(0), c10::DistBackendError);
    EXPECT_THROW(unused.process_group(1), c10::DistBackendError);
    expect_error([&] { unused.process_group(); }, {"[process_group]", "closed", " of 4"});
    EXPECT_EQ(unused.rank_at({0, 3}), 0);
    // One rank needs no world.
    EXPECT_EQ(sum_over(*unused.process_group(0), 7), 7);
  }
}

}  // namespace tessera::mesh_process_group_test
