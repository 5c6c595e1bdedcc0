// The order in which a training step queues its work on a device, and its memory there.
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "device/sim_tensors.h"
#include "support/even_stack.h"
#include "support/models.h"
#include "support/sim_device/sim_device.h"

namespace tessera::testing::overlap_test {

constexpr int64_t kWidth = 64, kLayers = 4, kRows = 4;
constexpr int64_t kUnitBytes = kWidth * kWidth * 4;

// A model of which each layer is a unit, on one rank.
struct Training {
  explicit Training(World& world, int64_t layers = kLayers, Offload offload = Offload::kNone,
                    ShardLevel level = ShardLevel::kParameters)
      : world(world),
        net(seeded(7, [&] { return std::make_shared<EvenStack>(kWidth, layers); })),
        sgd(net->parameters(), torch::optim::SGDOptions(0.1)),
        sharded(fully_shard(
            net, {.level = level, .unit_bytes = kUnitBytes, .prefetch = 1, .offload = offload})),
        optimizer(sharded, sgd) {}

  torch::Tensor loss(const Batch& batch) {
    return rank_loss(*net, batch, world.rank(), world.size(), 0);
  }
  void run(int steps) {
    for (int64_t step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      loss(global_batch(step, kRows, kWidth, kWidth)).backward();
      optimizer.step();
    }
    sim::synchronize(test_device());
  }

  World& world;
  std::shared_ptr<EvenStack> net;
  torch::optim::SGD sgd;
  ShardedModule sharded;
  ShardedOptimizer optimizer;
};

// The operations of a device in the order of issue: G for a gather, R for a reduction, M for a
// product of matrices, U and D for copies up from the host and down to it.
std::string order_of(const std::vector<sim::LoggedOperation>& operations, int device) {
  static const std::map<std::string, char> kLetters = {
      {"all_gather", 'G'},  {"reduce_scatter", 'R'}, {"aten::mm", 'M'},
      {"aten::addmm", 'M'}, {"copy to device", 'U'}, {"copy to host", 'D'}};
  std::string order;
  for (const sim::LoggedOperation& operation : operations) {
    const auto letter = kLetters.find(operation.name);
    if (operation.device == device && letter != kLetters.end()) order += letter->second;
  }
  return order;
}

// The operations of all ranks in the third step; at its beginning the batch is there already.
template <class... Options>
std::vector<sim::LoggedOperation> operations_of_a_step(const Options&... options) {
  std::vector<sim::LoggedOperation> operations;
  run_world(2, [&](World& world) {
    Training training(world, kLayers, options...);
    training.run(2);
    training.optimizer.zero_grad();
    const Batch batch = global_batch(2, kRows, kWidth, kWidth);
    world.process_group()->barrier({"begin"});
    std::unique_ptr<sim::Log> log;
    if (world.rank() == 0) log = std::make_unique<sim::Log>();
    world.process_group()->barrier({"log"});
    training.loss(batch).backward();
    training.optimizer.step();
    sim::synchronize(test_device());
    world.process_group()->barrier({"end"});
    if (log) operations = log->operations();
  });
  return operations;
}

// Between forward and backward, the last two units stay; backward needs no gradient of the first
// one's input. The first two units of the next forward are gathered behind the step.
TEST(Overlap, EachGatherIsIssuedBeforeTheWorkOfTheUnitAheadOfIt) {
  const std::string order = order_of(operations_of_a_step(), 0);
  const std::string forward =
      "M"
      "GM"
      "GM"
      "M";
  const std::string backward =
      "MMR"
      "MGMR"
      "MMR"
      "MR";
  EXPECT_EQ(order, forward + backward + "GG");
}

// A unit's shard goes up right before its gather, which is issued as without offload, and down come
// the gradients of one unit more than the host has stepped. All copies are on streams beside that
// of the kernels.
TEST(Overlap, OffloadedStateIsCopiedBesideTheKernels) {
  const auto operations = operations_of_a_step(Offload::kHost);
  EXPECT_EQ(order_of(operations, 0),
            "MUGMUGMM"
            "MMRMUGMRMMRMR"
            "DDDDUGUG");
  std::set<int64_t> kernels, copies;
  for (const sim::LoggedOperation& operation : operations) {
    if (operation.device != 0) continue;
    if (operation.name == "aten::mm") kernels.insert(operation.stream);
    if (operation.name.starts_with("copy to")) copies.insert(operation.stream);
  }
  for (const int64_t stream : copies) EXPECT_FALSE(kernels.contains(stream));
}

// Shards that stay on the device are brought up to date while the host steps the next unit.
TEST(Overlap, TheHostStepsAUnitWhileTheNextIsCopied) {
  EXPECT_EQ(order_of(operations_of_a_step(Offload::kHost, ShardLevel::kGradients), 0),
            "MMMM"
            "MMRMMRMMRMR"
            "DDUDUDUUGGGG");
}

// TESSERA_TRACE=FILE keeps the trace, for a look at it.
TEST(Overlap, TheTraceHasABarForEachOperationOnItsStream) {
  const auto operations = operations_of_a_step();
  const std::string text = sim::chrome_trace(operations);
  if (const char* const file = std::getenv("TESSERA_TRACE")) std::ofstream(file) << text;
  const auto trace = nlohmann::json::parse(text);
  // The other rank may be at the end of its world.
  ASSERT_EQ(trace.size(), std::ranges::count_if(operations, [](const auto& operation) {
              return operation.end != decltype(operation.end)();
            }));
  std::set<int64_t> gathers, kernels;
  for (const auto& bar : trace) {
    EXPECT_GE(bar.at("ts"), bar.at("args").at("issued"));
    EXPECT_GE(bar.at("dur"), 0);
    if (bar.at("pid") != 0) continue;
    if (bar.at("name") == "all_gather") gathers.insert(bar.at("tid").get<int64_t>());
    if (bar.at("name") == "aten::mm") kernels.insert(bar.at("tid").get<int64_t>());
  }
  EXPECT_EQ(gathers.size(), 1U);
  EXPECT_EQ(kernels.size(), 1U);
  EXPECT_NE(gathers, kernels);
}

class OverlapOnHost : public ::testing::TestWithParam<Offload> {};
INSTANTIATE_TEST_SUITE_P(, OverlapOnHost, ::testing::Values(Offload::kNone, Offload::kHost));

TEST_P(OverlapOnHost, TheHostQueuesAForwardWithoutWaitingForTheDevice) {
  run_world(2, [&](World& world) {
    Training training(world, kLayers, GetParam());
    training.run(2);
    training.optimizer.zero_grad();
    const Batch batch = global_batch(2, kRows, kWidth, kWidth);
    const c10::Stream stream =
        c10::impl::VirtualGuardImpl(test_device().type()).getStream(test_device());
    sim::Hold hold(stream);
    const torch::Tensor loss = training.loss(batch);
    EXPECT_FALSE(stream.query()) << "nothing was held";
    hold.release();
    loss.backward();
    training.optimizer.step();
    sim::synchronize(test_device());
  });
}

TEST(Overlap, MoreUnitsTakeNoMoreMemoryDuringAStep) {
  // The most that a step needs beside what stays, in whole units: the parameters in use and ahead,
  // the gradients in flight, and what activations take.
  const auto needed = [](World& world, int64_t layers) {
    Training training(world, layers);
    training.run(2);
    const int64_t before = sim::memory(test_device()).live;
    sim::reset_peak(test_device());
    training.run(3);
    return (sim::memory(test_device()).peak - before) / kUnitBytes;
  };
  run_world(2, [&](World& world) {
    const int64_t few = needed(world, kLayers), many = needed(world, 3 * kLayers);
    EXPECT_LE(many, few + 1);
    EXPECT_LE(few, 5);
  });
}

}  // namespace tessera::testing::overlap_test
