// Errors of training on devices: each is an error on all ranks that says what to do.
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "device/sim_tensors.h"
#include "support/error_of.h"
#include "support/even_stack.h"
#include "support/models.h"
#include "support/sim_device/sim_device.h"

namespace tessera::testing::bad_input_test {

using sim_tensors::error_text;
using namespace std::chrono_literals;

constexpr int64_t kWidth = 64, kLayers = 4, kRows = 4;

std::shared_ptr<EvenStack> stack_on(c10::Device device) {
  auto net = seeded(7, [] { return std::make_shared<EvenStack>(kWidth, kLayers); });
  net->to(device);
  return net;
}

void expect_has(const std::string& text, const std::string& part) { expect_contains(text, {part}); }

TEST(BadDevices, TypesMustBeEqualOnAllRanks) {
  run_world(3, [](World& world) {
    const auto net = stack_on(world.rank() == 1 ? c10::Device(at::kCPU) : test_device());
    const std::string error = error_text([&] { fully_shard(net); });
    expect_has(error, "must be the same on all ranks");
    expect_has(error, "rank 0 has 'fc0.weight' Float [64, 64] with strides [64, 1] on sim");
    expect_has(error, "rank 1 has 'fc0.weight' Float [64, 64] with strides [64, 1] on cpu");
  });
}

TEST(BadDevices, TwoRanksOnOne) {
  run_world(3, [](World& world) {
    const auto net = stack_on(sim::device(world.rank() == 2 ? 0 : world.rank()));
    const std::string error = error_text([&] { fully_shard(net); });
    expect_has(error, "ranks 0 and 2 have their parameters on one");
    expect_has(error, "World::local_rank()");
  });
}

TEST(BadDevices, APlanNeedsOneThatIsThere) {
  run_world(2, [](World& world) {
    const auto net = stack_on(c10::Device(at::kCPU));
    ShardPlan plan;
    if (world.rank() == 1) plan.device = c10::Device(c10::DeviceType::PrivateUse1, 9);
    const std::string error = error_text([&] { fully_shard(net, plan); });
    expect_has(error, "8 devices of type");
    // The plan of rank 0 is in order: nothing has changed, and the next call is fine.
    const ShardedModule sharded = fully_shard(net, {.device = test_device()});
    for (const at::Tensor& parameter : net->parameters())
      EXPECT_EQ(parameter.device(), test_device());
  });
}

TEST(BadDevices, ConnectionsOfTheHostDoNotCarryTheirTensors) {
  run_world(2, [](World& world) {
    const auto keys = c10::make_intrusive<c10d::PrefixStore>("gloo alone", world.store());
    const auto host = gloo_process_group(keys, world.rank(), world.size(), 20s);
    const auto net = stack_on(test_device());
    const std::string error = error_text([&] { fully_shard(net, {.process_group = host}); });
    expect_has(error, "init({.backend = ...}), with one of nccl, simccl");
  });
}

// One rank has no memory left in the middle of a step. The other queues its own, and waits for the
// agreement at the end of backward.
void expect_all_are_told(std::vector<int64_t> widths, const std::string& failed) {
  run_world(
      2,
      [&](World& world) {
        auto net = seeded(7, [&] {
          torch::nn::Sequential net;
          for (size_t i = 0; i + 1 < widths.size(); ++i) {
            const auto options = torch::nn::LinearOptions(widths[i], widths[i + 1]).bias(false);
            net->push_back("fc" + std::to_string(i), torch::nn::Linear(options));
          }
          return net;
        });
        torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
        const ShardedModule sharded = fully_shard(
            net,
            {.level = ShardLevel::kParameters, .unit_bytes = kWidth * kWidth * 4, .prefetch = 1});
        ShardedOptimizer optimizer(sharded, sgd);
        const auto step = [&](int64_t number) {
          optimizer.zero_grad();
          const torch::Tensor x = global_batch(number, kRows, kWidth, 1).x;
          net->forward(x).square().mean().backward();
          optimizer.step();
        };
        step(0);
        sim::synchronize(test_device());
        if (world.rank() == 1)
          sim::set_memory_limit(test_device(), sim::memory(test_device()).live + (24 << 10));
        const std::string error = error_text([&] { step(1); });
        expect_has(error, "rank 1");
        expect_has(error, "out of memory");
        expect_has(error, failed);
        if (world.rank() == 1) {
          expect_has(error, "plan.prefetch");
          sim::set_memory_limit(test_device(), int64_t{1} << 30);
          expect_has(error_text([&] { step(2); }), "any more");
        }
      },
      30s);
  forget_device_faults();
}

TEST(BadDevices, NoMemoryInTheMiddleOfAGather) {
  expect_all_are_told({64, 64, 64, 1024, 16}, "gather unit 'fc2");
}

// Its units are gathered once more, and the others get the values that they would have had.
TEST(BadDevices, ARankMayGoOnAfterAForwardThatFailed) {
  run_world(
      2,
      [](World& world) {
        const auto gradient = [&](bool fails) {
          const auto net = stack_on(test_device());
          ShardedModule sharded = fully_shard(
              net,
              {.level = ShardLevel::kParameters, .unit_bytes = kWidth * kWidth * 4, .prefetch = 0});
          for (int64_t number = 0; number < 5; ++number) {
            if (fails && number == 2 && world.rank() == 1)
              net->fcs[1]->forward(net->fcs[0]->forward(global_batch(2, 4, 64, 1).x));
            rank_loss(*net, global_batch(number, kRows, kWidth, kWidth), world.rank(), 2, 0)
                .backward();
          }
          return sharded.full_grad("fc0.weight").cpu();
        };
        const at::Tensor expected = gradient(false);
        EXPECT_TRUE(gradient(true).equal(expected));
      },
      30s);
}

TEST(BadDevices, NoMemoryInTheMiddleOfAReduction) {
  expect_all_are_told({64, 64, 64, 64, 64}, "reduce the gradients of unit 'fc3");
}

}  // namespace tessera::testing::bad_input_test
