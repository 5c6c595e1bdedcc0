#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/run_world.h"

namespace tessera::decorator_test {

using namespace std::chrono_literals;

constexpr CollectiveTag kTag{.subject = "head", .channel = Channel::kGrads};

class Counting : public ::testing::TestWithParam<int> {};

TEST_P(Counting, CountsCallsAndBytesSent) {
  run_world(GetParam(), [](World& world) {
    const auto counting = counting_process_group(world.process_group());
    const int64_t n = world.size(), rank = world.rank();
    std::vector<int64_t> bounds{0};
    for (int r = 0; r < n; ++r) {
      bounds.push_back(bounds.back() + 10 * r + 1);
    }
    const int64_t own = 10 * rank + 1, all = bounds.back();
    auto flat = torch::zeros({all}), shard = torch::zeros({own});
    auto numbers = torch::zeros({60}, torch::kInt64);
    counting->all_gather(flat, shard, bounds, kTag)->wait();
    counting->reduce_scatter(shard, {{0, flat, all}}, bounds, {}, kTag)->wait();
    counting->reduce_scatter(shard, {{0, flat, all}}, bounds, {}, kTag)->wait();
    counting->all_reduce(numbers, ReduceOp::kSum, kTag)->wait();
    counting->broadcast(numbers, 0, kTag)->wait();
    counting->barrier(kTag);

    const CollectiveCounts counts = counting->counts();
    EXPECT_EQ(counts.all_gather.calls, 1);
    EXPECT_EQ(counts.all_gather.bytes_sent, (n - 1) * own * 4);
    EXPECT_EQ(counts.reduce_scatter.calls, 2);
    EXPECT_EQ(counts.reduce_scatter.bytes_sent, 2 * (all - own) * 4);
    EXPECT_EQ(counts.all_reduce.calls, 1);
    EXPECT_EQ(counts.all_reduce.bytes_sent, (n - 1) * 480);  // in one round
    EXPECT_EQ(counts.broadcast.calls, 1);
    EXPECT_EQ(counts.broadcast.bytes_sent, rank == 0 ? (n - 1) * 480 : 0);
    EXPECT_EQ(counts.barrier.calls, 1);
    EXPECT_EQ(counts.calls(), 6);
    EXPECT_EQ(counts.bytes_sent(), counts.all_gather.bytes_sent + counts.reduce_scatter.bytes_sent +
                                       counts.all_reduce.bytes_sent + counts.broadcast.bytes_sent);
    counting->reset_counts();
    EXPECT_EQ(counting->counts().calls(), 0);
    EXPECT_EQ(counting->counts().bytes_sent(), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Counting, ::testing::Values(1, 2, 3, 4));

TEST(Counting, DoesNotCountWhatWasRefused) {
  const auto counting = counting_process_group(single_process_group());
  auto flat = torch::zeros({3});
  EXPECT_THROW(counting->broadcast(flat, 1, kTag), c10::ValueError);
  EXPECT_EQ(counting->counts().calls(), 0);
}

TEST(Tracing, RecordsTheLastCollectives) {
  run_world(2, [](World& world) {
    const auto tracing = tracing_process_group(world.process_group(), 3);
    world.set_process_group(tracing);
    auto number = torch::zeros({4});
    for (int i = 0; i < 4; ++i) {
      default_process_group()->all_reduce(number, ReduceOp::kSum, kTag)->wait();
    }
    const auto late = default_process_group()->broadcast(
        number, 0, {.subject = "tail", .channel = Channel::kControl});
    auto records = tracing->records();
    ASSERT_EQ(records.size(), 3u);
    EXPECT_EQ(records[0].sequence, 2);
    EXPECT_EQ(records[0].name, "all_reduce");
    EXPECT_EQ(records[0].subject, "head");
    EXPECT_EQ(records[0].channel, Channel::kGrads);
    EXPECT_EQ(records[0].bytes, 16);
    EXPECT_GE(records[0].completed_us, records[0].issued_us);
    EXPECT_EQ(records[2].name, "broadcast");
    EXPECT_EQ(records[2].subject, "tail");
    EXPECT_EQ(records[2].completed_us, -1);
    late->wait();
    records = tracing->records();
    EXPECT_GE(records[2].completed_us, records[2].issued_us);
    EXPECT_GE(records[2].issued_us, records[1].completed_us);
  });
}

TEST(Tracing, EndsErrorsWithTheLastRecords) {
  std::atomic<bool> waiting{true};
  run_world(
      2,
      [&](World& world) {
        const auto tracing = tracing_process_group(world.process_group());
        auto number = torch::zeros({4});
        for (int i = 0; i < 9; ++i) {
          tracing->all_reduce(number, ReduceOp::kSum, kTag)->wait();
        }
        if (world.rank() == 0) {
          while (waiting) {
            std::this_thread::sleep_for(10ms);
          }
          return;
        }
        try {
          tracing->broadcast(number, 0, {.subject = "tail"})->wait();
          ADD_FAILURE() << "no exception";
        } catch (const c10::DistBackendError& error) {
          const std::string text = error.what_without_backtrace();
          EXPECT_EQ(text.find("#4 all_reduce"), std::string::npos) << text;
          for (const char* part :
               {"[broadcast] unit 'tail'", "Last collectives", "#5 all_reduce 'head'",
                "#9 broadcast 'tail' (kControl), 16 bytes", "not complete"}) {
            testing::expect_contains(text, {part});
          }
        }
        waiting = false;
      },
      1s);
}

TEST(Faults, FailTheNthCollectiveOfAName) {
  const auto faulty =
      fault_process_group(single_process_group(), {{.name = "all_reduce", .nth = 1}});
  auto number = torch::zeros({1});
  faulty->broadcast(number, 0, kTag);
  faulty->all_reduce(number, ReduceOp::kSum, kTag);
  EXPECT_THROW(faulty->all_reduce(number, ReduceOp::kSum, kTag), c10::DistBackendError);
  faulty->all_reduce(number, ReduceOp::kSum, kTag);
}

TEST(Faults, DelayAnyCollective) {
  const auto late =
      fault_process_group(single_process_group(), {{.nth = 1, .fail = false, .delay = 60ms}});
  late->barrier(kTag);
  const auto start = std::chrono::steady_clock::now();
  late->barrier(kTag);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 60ms);
}

TEST(Faults, OfOneRankEndTheOthers) {
  try {
    run_world(
        3,
        [](World& world) {
          if (world.rank() == 1) {
            world.set_process_group(fault_process_group(world.process_group(), {{.nth = 2}}));
          }
          auto number = torch::zeros({1});
          for (int i = 0; i < 5; ++i) {
            default_process_group()->all_reduce(number, ReduceOp::kSum, kTag)->wait();
          }
        },
        20s);
    FAIL() << "no exception";
  } catch (const c10::DistBackendError& error) {
    testing::expect_contains(error.what(), {"rank 1 of 3 was told to fail"});
  }
}

// Notes the names of the collectives that it passes on.
class Noting : public ProcessGroupDecorator {
 public:
  using ProcessGroupDecorator::ProcessGroupDecorator;
  std::vector<std::string> names;

 private:
  WorkPtr issue(Collective collective) override {
    names.emplace_back(collective.name());
    return pass_on(std::move(collective));
  }
};

TEST(Decorators, OfTheUserAreToldOfEachCollectiveOnce) {
  run_world(2, [](World& world) {
    const auto noting = std::make_shared<Noting>(world.process_group());
    const auto counting = counting_process_group(noting);
    const auto numbers = torch::ones({4});
    counting->all_reduce(numbers, ReduceOp::kSum, kTag)->wait();
    counting->barrier(kTag);
    all_gather_bytes(*counting, "x", kTag);
    EXPECT_EQ(noting->names.size(), counting->counts().calls());
    EXPECT_EQ(noting->names[0], "all_reduce");
    EXPECT_EQ(noting->names[1], "barrier");
    EXPECT_EQ(numbers.sum().item<float>(), 8);
    EXPECT_EQ(&counting->transport(), world.process_group().get());
  });
}

TEST(Decorators, AreNotToldOfWhatIsRefused) {
  Noting noting(single_process_group());
  EXPECT_THROW(noting.broadcast(torch::ones({1}), 1, kTag), c10::ValueError);
  EXPECT_TRUE(noting.names.empty());
  EXPECT_THROW(Noting(nullptr), c10::ValueError);
}

// Conjugates and negatives are resolved before a decorator sees them, and once.
TEST(Decorators, SeeTensorsWhoseMemoryHoldsTheirValues) {
  class Looking : public ProcessGroupDecorator {
   public:
    using ProcessGroupDecorator::ProcessGroupDecorator;

   private:
    WorkPtr issue(Collective collective) override {
      EXPECT_FALSE(std::get<AllReduce>(collective.call).tensor.is_neg());
      return pass_on(std::move(collective));
    }
  };
  run_world(2, [](World& world) {
    Looking looking(world.process_group());
    const auto tensor = torch::_neg_view(torch::ones({3}));
    looking.all_reduce(tensor, ReduceOp::kSum, kTag)->wait();
    EXPECT_TRUE(torch::equal(tensor.resolve_neg(), torch::full({3}, -2.F)));
  });
}

}  // namespace tessera::decorator_test
