// Process groups of some ranks of a world.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "support/error_of.h"
#include "support/models.h"

namespace tessera::world_parts_test {

using namespace std::chrono_literals;
using testing::expect_error;

constexpr CollectiveTag kTag{.subject = "part"};

// The world's ranks in the order of the process group.
std::vector<int> members(ProcessGroup& process_group, const World& world) {
  std::vector<int64_t> bounds(process_group.size() + 1);
  for (int r = 0; r <= process_group.size(); ++r) bounds[r] = r;
  const auto flat = torch::empty({process_group.size()}, torch::kInt);
  process_group.all_gather(flat, torch::full({1}, world.rank(), torch::kInt), bounds, kTag)->wait();
  return {flat.const_data_ptr<int>(), flat.const_data_ptr<int>() + flat.numel()};
}

double sum_over(ProcessGroup& process_group, double value) {
  const auto number = torch::full({1}, value, torch::kDouble);
  process_group.all_reduce(number, ReduceOp::kSum, kTag)->wait();
  return number.item<double>();
}

using Ranks = std::vector<int>;

TEST(NewProcessGroup, HasTheRanksInTheOrderGiven) {
  run_world(4, [](World& world) {
    for (const Ranks& ranks :
         {Ranks{0, 1}, Ranks{1, 0}, Ranks{3, 0, 2}, Ranks{2, 3, 1, 0}, Ranks{0, 1, 2, 3}}) {
      const auto part = world.new_process_group(ranks);
      const auto own = std::find(ranks.begin(), ranks.end(), world.rank());
      if (own == ranks.end()) {
        EXPECT_EQ(part, nullptr);
        continue;
      }
      EXPECT_EQ(part->rank(), own - ranks.begin());
      EXPECT_EQ(part->size(), static_cast<int>(ranks.size()));
      EXPECT_EQ(part->timeout(), world.process_group()->timeout());
      EXPECT_EQ(part->backend_name(), "gloo");
      EXPECT_EQ(members(*part, world), ranks);
    }
    world.process_group()->barrier(kTag);
  });
}

TEST(NewProcessGroup, IsNullAtOnceForRanksThatAreNotInIt) {
  std::atomic<bool> returned{false};
  run_world(3, [&](World& world) {
    if (world.rank() == 1) {
      EXPECT_EQ(world.new_process_group({2, 0}), nullptr);
      returned = true;
      return;
    }
    while (!returned) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(members(*world.new_process_group({2, 0}), world), Ranks({2, 0}));
  });
}

TEST(NewProcessGroup, RefusesRanksThatTheWorldDoesNotHaveOrThatComeTwice) {
  for (const int size : {1, 3}) {
    run_world(size, [size](World& world) {
      for (const Ranks& ranks : {Ranks{}, Ranks{0, 0}, Ranks{-1}, Ranks{0, size},
                                 Ranks{0, size + 5}, Ranks{size - 1, 0, size - 1}}) {
        EXPECT_THROW(world.new_process_group(ranks), c10::ValueError) << ranks;
      }
      expect_error(
          [&] {
            world.new_process_group({0, size});
          },
          {"[new_process_group]", "from 0 to " + std::to_string(size - 1)});
      EXPECT_EQ(sum_over(*world.process_group(), 1), size);
    });
  }
}

TEST(NewProcessGroup, OfOneRankNeedsNobody) {
  run_world(3, [](World& world) {
    const auto alone = world.new_process_group({world.rank()});
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->rank(), 0);
    EXPECT_EQ(sum_over(*alone, 5), 5);
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(world.new_process_group({rank}) != nullptr, rank == world.rank());
  });
}

TEST(NewProcessGroup, OfTheSameRanksDoNotMixUpTheirMessages) {
  run_world(2, [](World& world) {
    const auto first = world.new_process_group({0, 1}), second = world.new_process_group({0, 1});
    const auto turned = world.new_process_group({1, 0});
    EXPECT_NE(first, second);
    EXPECT_EQ(turned->rank(), 1 - world.rank());
    // Issued in different orders by the two ranks.
    std::vector<ProcessGroupPtr> order{first, second, turned, world.process_group()};
    std::vector<float> factors{1, 10, 100, 1000};
    if (world.rank() == 1) {
      std::reverse(order.begin(), order.end());
      std::reverse(factors.begin(), factors.end());
    }
    for (int round = 0; round < 20; ++round) {
      std::vector<torch::Tensor> numbers;
      std::vector<WorkPtr> works;
      for (size_t i = 0; i < order.size(); ++i) {
        numbers.push_back(torch::full({3000}, factors[i] * (world.rank() + 1 + round)));
        works.push_back(order[i]->all_reduce(numbers[i], ReduceOp::kSum, kTag));
      }
      for (size_t i = 0; i < order.size(); ++i) {
        works[i]->wait();
        EXPECT_TRUE(
            numbers[i].eq(factors[i] * static_cast<float>(3 + 2 * round)).all().item<bool>());
      }
    }
  });
}

TEST(NewProcessGroup, OverlappingOnesWorkAtTheSameTime) {
  run_world(4, [](World& world) {
    const std::vector<Ranks> sets = {{0, 1, 2}, {1, 2, 3}, {3, 0}, {0, 1, 2, 3}, {2, 1}};
    std::vector<ProcessGroupPtr> parts;
    for (const Ranks& ranks : sets) parts.push_back(world.new_process_group(ranks));
    std::vector<torch::Tensor> numbers(sets.size());
    std::vector<WorkPtr> works(sets.size());
    for (size_t i = 0; i < sets.size(); ++i) {
      if (!parts[i]) continue;
      numbers[i] = torch::full({100'000}, std::pow(10.0, world.rank()));
      works[i] = parts[i]->all_reduce(numbers[i], ReduceOp::kSum, kTag);
    }
    for (size_t i = sets.size(); i-- > 0;) {
      if (!parts[i]) continue;
      works[i]->wait();
      double expected = 0;
      for (const int rank : sets[i]) expected += std::pow(10.0, rank);
      EXPECT_TRUE(numbers[i].eq(expected).all().item<bool>()) << sets[i];
    }
  });
}

TEST(NewProcessGroup, ServesAThreadOfItsOwn) {
  run_world(3, [](World& world) {
    const auto one = world.new_process_group({0, 1, 2}), two = world.new_process_group({2, 1, 0});
    const auto work = [](ProcessGroup& process_group, double value) {
      for (int i = 0; i < 30; ++i) EXPECT_EQ(sum_over(process_group, value + i), 3 * (value + i));
    };
    std::thread other([&] { work(*two, 100); });
    work(*one, 1);
    other.join();
  });
}

TEST(NewProcessGroup, IsClosedWithTheWorld) {
  std::mutex mutex;
  std::vector<ProcessGroupPtr> held;
  run_world(4, [&](World& world) {
    const auto part = world.new_process_group({0, 1, 2, 3});
    const auto hybrid = world.hybrid_process_groups(2);
    EXPECT_EQ(sum_over(*part, 1), 4);
    EXPECT_EQ(sum_over(*hybrid.shard, 1) + sum_over(*hybrid.replicate, 1), 4);
    const std::lock_guard lock(mutex);
    held.insert(held.end(), {part, hybrid.shard, hybrid.replicate});
  });
  ASSERT_EQ(held.size(), 12);
  const auto number = torch::ones({1});
  const auto large = torch::ones({100'000});
  for (const auto& part : held) {
    EXPECT_GE(part->size(), 2);
    EXPECT_THROW(part->barrier(kTag), c10::DistBackendError);
    EXPECT_THROW(part->all_reduce(number, ReduceOp::kSum, kTag)->wait(), c10::DistBackendError);
    EXPECT_THROW(part->all_reduce(large, ReduceOp::kSum, kTag)->wait(), c10::DistBackendError);
    EXPECT_THROW(part->broadcast(number, 0, kTag)->wait(), c10::DistBackendError);
  }
}

// A rank that leaves early must not leave the others waiting.
TEST(NewProcessGroup, FailsForAllWhenARankLeaves) {
  EXPECT_THROW(run_world(
                   3,
                   [](World& world) {
                     const auto part = world.new_process_group({0, 1, 2});
                     EXPECT_EQ(sum_over(*part, 1), 3);
                     if (world.rank() != 1) sum_over(*part, 1);
                   },
                   2s),
               c10::DistBackendError);
}

TEST(NewProcessGroup, SaysThatAnotherRankDoesNotCome) {
  std::atomic<bool> failed{false};
  run_world(
      2,
      [&](World& world) {
        if (world.rank() == 1) {
          while (!failed) std::this_thread::sleep_for(5ms);
          return;
        }
        try {
          world.new_process_group({0, 1});
          ADD_FAILURE() << "no exception";
        } catch (const c10::DistNetworkError& error) {
          const std::string text = error.what_without_backtrace();
          for (const char* part :
               {"[new_process_group]", "rank 0 of ranks 0, 1", "in vain for rank 1"})
            testing::expect_contains(text, {part});
        } catch (const std::exception& error) {
          ADD_FAILURE() << "another exception: " << error.what();
        }
        failed = true;
      },
      1s);
}

TEST(NewProcessGroup, BelongsToTheWorldBehindADecorator) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    EXPECT_EQ(sum_over(*world.new_process_group({1, 0}), 2), 4);
    EXPECT_EQ(
        std::dynamic_pointer_cast<CountingProcessGroup>(world.process_group())->counts().calls(),
        0);
  });
}

TEST(HybridProcessGroups, AreNeighboursAndTheRanksOfTheSameShard) {
  for (const auto& [size, shard_size] :
       {std::pair(4, 2), std::pair(6, 2), std::pair(6, 3), std::pair(3, 1), std::pair(3, 3)}) {
    run_world(size, [&, size = size, shard_size = shard_size](World& world) {
      const auto [shard, replicate] = world.hybrid_process_groups(shard_size);
      Ranks neighbours, alike;
      for (int i = 0; i < shard_size; ++i)
        neighbours.push_back(world.rank() / shard_size * shard_size + i);
      for (int rank = world.rank() % shard_size; rank < size; rank += shard_size)
        alike.push_back(rank);
      EXPECT_EQ(members(*shard, world), neighbours);
      EXPECT_EQ(members(*replicate, world), alike);
      EXPECT_EQ(shard->rank(), world.rank() % shard_size);
      EXPECT_EQ(replicate->rank(), world.rank() / shard_size);
      // Both at once, several times over.
      const auto again = world.hybrid_process_groups(shard_size);
      const auto a = torch::full({5000}, 1.0 + world.rank()), b = a.clone(), c = a.clone();
      const std::vector<WorkPtr> works{shard->all_reduce(a, ReduceOp::kMax, kTag),
                                       replicate->all_reduce(b, ReduceOp::kMax, kTag),
                                       again.shard->all_reduce(c, ReduceOp::kMin, kTag)};
      for (const auto& work : works) work->wait();
      EXPECT_EQ(a[7].item<float>(), static_cast<float>(neighbours.back() + 1));
      EXPECT_EQ(b[7].item<float>(), static_cast<float>(alike.back() + 1));
      EXPECT_EQ(c[7].item<float>(), static_cast<float>(neighbours.front() + 1));
    });
  }
}

TEST(HybridProcessGroups, RefuseASizeThatDoesNotDivideTheRanks) {
  run_world(4, [](World& world) {
    for (const int shard_size : {0, -1, -2, 3, 5, 8})
      EXPECT_THROW(world.hybrid_process_groups(shard_size), c10::ValueError) << shard_size;
    expect_error([&] { world.hybrid_process_groups(3); },
                 {"[hybrid_process_groups]", "must divide the number of ranks", "got 3 for 4"});
    EXPECT_EQ(members(*world.hybrid_process_groups(4).shard, world), Ranks({0, 1, 2, 3}));
  });
}

TEST(HybridProcessGroups, OfAWorldOfOneAreOfOne) {
  run_world(1, [](World& world) {
    const auto [shard, replicate] = world.hybrid_process_groups(1);
    EXPECT_EQ(shard->size(), 1);
    EXPECT_EQ(replicate->size(), 1);
    EXPECT_EQ(sum_over(*shard, 3) + sum_over(*replicate, 4), 7);
    EXPECT_EQ(members(*world.new_process_group({0}), world), Ranks({0}));
    EXPECT_THROW(world.hybrid_process_groups(2), c10::ValueError);
  });
}

}  // namespace tessera::world_parts_test
