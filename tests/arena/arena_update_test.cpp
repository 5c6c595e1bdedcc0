// Gathers in shared memory that bring shards up to date: who computes, and when.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <chrono>
#include <latch>
#include <span>
#include <thread>
#include <vector>

#include "group/shard_update.h"
#include "support/arena_parts.h"
#include "support/run_world.h"
#include "support/shared_memory_of.h"

namespace tessera {
namespace arena_update_test {

using namespace testing;

constexpr CollectiveTag kTag{.subject = "updates", .channel = Channel::kParams};
constexpr int64_t kNumel = 120'001;  // not a multiple of anything
constexpr int kAddRule = 7;

// shard += other * number
void add(std::span<const ShardUpdate> updates) {
  for (const ShardUpdate& update : updates) {
    auto* const values = reinterpret_cast<float*>(update.tensors[0]);
    const auto* const other = reinterpret_cast<const float*>(update.tensors[1]);
    for (int64_t i = 0; i < update.numel; ++i)
      values[i] += other[i] * static_cast<float>(update.numbers[0]);
  }
}

std::vector<int64_t> bounds_of(int size) {
  std::vector<int64_t> bounds;
  for (int rank = 0; rank <= size; ++rank) bounds.push_back(kNumel * rank / size);
  return bounds;
}

// A buffer of the world's ranks, at first zeros.
class Buffer {
 public:
  explicit Buffer(World& world)
      : group_(*world.process_group()),
        rank_(world.rank()),
        bounds_(bounds_of(world.size())),
        buffer_(*shared_memory_of(group_).share(kNumel * 4, kTag)),
        values_(buffer_.bytes.view(torch::kFloat)) {
    set_update_rule(kAddRule, add);
  }

  const torch::Tensor& values() const { return values_; }
  int64_t begin() const { return bounds_[rank_]; }
  int64_t numel() const { return bounds_[rank_ + 1] - begin(); }

  void defer(const torch::Tensor& other, double number, int64_t from = 0) {
    buffer_.updates->updates.push_back(
        {.begin = begin() + from,
         .numel = other.numel(),
         .dtype = torch::kFloat,
         .rule = kAddRule,
         .tensors = {nullptr, static_cast<std::byte*>(other.mutable_data_ptr())},
         .numbers = {number}});
    buffer_.updates->kept.push_back(other);
  }

  WorkPtr gather() {
    return group_.all_gather(values_, values_.narrow(0, begin(), numel()), bounds_, kTag);
  }

 private:
  ProcessGroup& group_;
  int rank_;
  std::vector<int64_t> bounds_;
  SharedBuffer buffer_;
  torch::Tensor values_;
};

torch::Tensor ranks_of(int size) {
  const auto bounds = bounds_of(size);
  auto expected = torch::empty({kNumel});
  for (int rank = 0; rank < size; ++rank)
    expected.narrow(0, bounds[rank], bounds[rank + 1] - bounds[rank]).fill_(rank + 1);
  return expected;
}

TEST(ArenaUpdate, AGatherWaitsForAllShards) {
  for (const int size : {2, 3}) {
    run_arena(size, [&](World& world) {
      Buffer buffer(world);
      for (int step = 1; step <= 30; ++step) {
        // All ranks read before anybody writes again.
        world.process_group()->barrier(kTag);
        buffer.defer(torch::full({buffer.numel()}, 0.5F), 2 * (world.rank() + 1));
        if (step % size == world.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        buffer.gather()->wait();
        ASSERT_TRUE(torch::equal(buffer.values(), ranks_of(size) * step)) << "step " << step;
      }
    });
  }
}

// A rank that has come computes what another left to who needs it.
TEST(ArenaUpdate, WhoNeedsThemComputesTheUpdatesOfAll) {
  std::latch shown(1), done(1);
  run_arena(2, [&](World& world) {
    Buffer buffer(world);
    buffer.defer(torch::full({buffer.numel()}, 1.F), world.rank() + 1);
    const WorkPtr work = buffer.gather();
    if (world.rank() == 1) {
      shown.count_down();
      done.wait();  // and does not call in
    } else {
      shown.wait();
      work->wait();
      EXPECT_TRUE(torch::equal(buffer.values(), ranks_of(2)));
      done.count_down();
    }
    work->wait();
    EXPECT_TRUE(torch::equal(buffer.values(), ranks_of(2)));
    EXPECT_EQ(parts_done_for_others(world), world.rank() == 0 ? 1 : 0);
  });
}

// A rank that has not come may still read the old values.
TEST(ArenaUpdate, NothingIsWrittenBeforeAllRanksHaveCome) {
  std::latch asked(1);
  run_arena(2, [&](World& world) {
    Buffer buffer(world);
    if (world.rank() == 0) {
      buffer.defer(torch::full({buffer.numel()}, 1.F), 1);
      const WorkPtr work = buffer.gather();
      for (int i = 0; i < 10; ++i) EXPECT_FALSE(work->is_completed());
      asked.count_down();
      work->wait();
    } else {
      asked.wait();
      EXPECT_TRUE(torch::equal(buffer.values(), torch::zeros({kNumel})));
      buffer.gather()->wait();
    }
    EXPECT_EQ(buffer.values()[0].item<float>(), 1);
    EXPECT_EQ(buffer.values()[kNumel - 1].item<float>(), 0);
  });
}

// Of one in two parts, one at once, one in one part.
TEST(ArenaUpdate, RanksMayDiffer) {
  run_arena(3, [&](World& world) {
    Buffer buffer(world);
    const auto ones = torch::ones({buffer.numel()});
    if (world.rank() == 0) {
      buffer.defer(ones.narrow(0, 0, 100), 1);
      buffer.defer(ones.narrow(0, 100, buffer.numel() - 100), 1, 100);
    } else if (world.rank() == 1) {
      buffer.values().narrow(0, buffer.begin(), buffer.numel()).fill_(2);
    } else {
      buffer.defer(ones, 3);
    }
    buffer.gather()->wait();
    EXPECT_TRUE(torch::equal(buffer.values(), ranks_of(3)));
  });
}

TEST(ArenaUpdate, IsDoneByARankThatOnlyAsks) {
  run_arena(2, [&](World& world) {
    Buffer buffer(world);
    buffer.defer(torch::ones({buffer.numel()}), world.rank() + 1);
    const WorkPtr work = buffer.gather();
    while (!work->is_completed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(torch::equal(buffer.values(), ranks_of(2)));
  });
}

// So that the ranks are not all at the memory at once.
TEST(ArenaUpdate, RanksTakeTurnsInComputingThoseOfUnitsToCome) {
  constexpr int kUnits = 8;
  std::barrier turn(2);
  run_arena(2, [&](World& world) {
    std::vector<Buffer> units;
    std::vector<WorkPtr> works;
    for (int unit = 0; unit < kUnits; ++unit) units.emplace_back(world);
    for (Buffer& unit : units) {
      unit.defer(torch::ones({unit.numel()}), 1);
      works.push_back(unit.gather());
    }
    // How many units are up to date from the first on, in the part of this rank.
    const auto ahead = [&] {
      int count = 0;
      while (count < kUnits && units[count].values()[units[count].begin()].item<float>() == 1)
        ++count;
      return count;
    };
    turn.arrive_and_wait();
    std::vector<int> seen;
    for (int unit = 0; unit + 2 < kUnits; ++unit) {
      // One after the other, so that nobody waits, and helps.
      if (world.rank() == 0) works[unit]->wait();
      turn.arrive_and_wait();
      if (world.rank() == 1) works[unit]->wait();
      turn.arrive_and_wait();
      seen.push_back(ahead() - unit);
    }
    // Its turn is each second unit: three are up to date, then two. The first part of the second
    // rank was done by the other one.
    for (size_t i = 3; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i] + seen[i - 1], 5);
      EXPECT_EQ(seen[i], seen[i - 2]);
    }
    turn.arrive_and_wait();
    for (const WorkPtr& work : works) work->wait();
    for (const Buffer& unit : units)
      EXPECT_TRUE(torch::equal(unit.values(), torch::ones({kNumel})));
  });
}

// A rank that leaves completes what it has shown, so that those that stay can go on.
TEST(ArenaUpdate, OfARankThatLeavesIsComplete) {
  std::latch left(1);
  run_arena(2, [&](World& world) {
    Buffer buffer(world);
    buffer.defer(torch::ones({buffer.numel()}), world.rank() + 1);
    const WorkPtr work = buffer.gather();
    if (world.rank() == 1) {
      { const World leaving = std::move(world); }
      left.count_down();
    } else {
      left.wait();
      work->wait();
      EXPECT_TRUE(torch::equal(buffer.values(), ranks_of(2)));
    }
  });
}

}  // namespace arena_update_test
}  // namespace tessera
