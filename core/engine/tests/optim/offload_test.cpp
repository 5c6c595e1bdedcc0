// Master weights and optimizer state in host memory or in files.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::offload_test {

constexpr int64_t kWidth = 37, kOut = 5;

TrainingRun adamw_run() {
  return run_by<Mlp, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2), kWidth, 3, kOut);
}

// Expects the bits that training without offloading has.
void expect_same_bits(const TrainingRun& run, World& world, ShardPlan plan,
                      const ScratchDirectory& directory) {
  const auto train = [&] { return train_sharded(run, world, plan, {.fused = true}); };
  const State expected = train();
  for (const auto offload : {Offload::kHost, Offload::kDirectory}) {
    plan.offload = offload;
    if (offload == Offload::kDirectory)
      plan.offload_directory = directory.path() / "made" / "when_needed";
    expect_same_state(train(), expected, 0, describe(world.size(), plan));
  }
}

TEST(Offload, GivesTheSameBitsAtEveryLevelPlaceAndPartition) {
  const ScratchDirectory directory;
  for (TrainingRun run : {adamw_run(), sgd_run<Mlp>(kWidth, 3, kOut)}) {
    run.steps = 3;
    on_worlds({1, 2, 3}, with_each_partition({.unit_bytes = 6000}),
              [&](World& world, const ShardPlan& plan) {
                expect_same_bits(run, world, plan, directory);
              });
  }
}

TEST(Offload, OfHalfModelsGivesTheSameBits) {
  const ScratchDirectory directory;
  const TrainingRun run = in_dtype(adamw_run(), torch::kBFloat16);
  on_worlds(
      {2}, at_each_level({.unit_bytes = 3000, .precision = {.master_dtype = at::kFloat}}),
      [&](World& world, const ShardPlan& plan) { expect_same_bits(run, world, plan, directory); });
}

int64_t resident_bytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

// A model of 32 MB whose AdamW state is 64 MB.
struct Wide : torch::nn::Module {
  Wide() {
    for (int i = 0; i < 8; ++i)
      fcs->push_back(torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false)));
  }
  torch::Tensor forward(torch::Tensor x) { return fcs->forward(x); }
  torch::nn::Sequential fcs = register_module("fcs", torch::nn::Sequential());
};

struct Growth {
  int64_t resident;
  ShardMemory memory;
};

Growth grow(const ShardPlan& plan) {
  Growth growth;
  run_world(1, [&](World&) {
    const auto net = std::make_shared<Wide>();
    auto sharded = fully_shard(net, plan);
    torch::optim::AdamW inner(net->parameters(), torch::optim::AdamWOptions(1e-3));
    const int64_t before = resident_bytes();
    ShardedOptimizer optimizer(sharded, inner);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      net->forward(torch::ones({1, 1024})).sum().backward();
      optimizer.step();
    }
    optimizer.zero_grad();
    growth = {resident_bytes() - before, optimizer.memory()};
  });
  return growth;
}

TEST(Offload, StateOnDiskIsNotResident) {
  if (std::getenv("ASAN_OPTIONS") || std::getenv("TSAN_OPTIONS"))
    GTEST_SKIP() << "sanitizers keep freed memory";
  const ScratchDirectory directory;
  const int64_t state = int64_t{64} << 20;
  const Growth in_memory = grow({.unit_bytes = 4 << 20});
  const Growth on_disk = grow({.unit_bytes = 4 << 20,
                               .offload = Offload::kDirectory,
                               .offload_directory = directory.path()});
  EXPECT_EQ(in_memory.memory.optimizer_state, state);
  EXPECT_EQ(in_memory.memory.offloaded, 0);
  EXPECT_EQ(on_disk.memory.optimizer_state, 0);
  EXPECT_EQ(on_disk.memory.offloaded, state + state / 2) << "state and masters";
  EXPECT_GT(in_memory.resident, state * 9 / 10);
  EXPECT_LT(on_disk.resident, in_memory.resident - state * 3 / 4);
}

TEST(Offload, FilesHaveNoNamesAndTakeTheirRoomAtOnce) {
  const ScratchDirectory directory;
  const auto memory = mapped_directory(directory.path());
  const auto tensor = memory->empty(1 << 20, at::kFloat);
  EXPECT_TRUE(memory->holds(tensor));
  EXPECT_FALSE(memory->holds(torch::zeros({3})));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  tensor.fill_(3);
  memory->rest();
  EXPECT_EQ(tensor.sum().item<double>(), 3.0 * (1 << 20));
  EXPECT_EQ(memory->empty(0, at::kFloat).numel(), 0);
}

TEST(Offload, ADirectoryThatCannotBeUsedIsAnErrorOnAllRanks) {
  const ScratchDirectory directory;
  std::ofstream(directory.path() / "file") << "text";
  run_world(2, [&](World& world) {
    const auto net = std::make_shared<Mlp>(8, 1, 3);
    const auto before = plain_state(*net);
    // On one rank only: the other reports it.
    const std::string path =
        world.rank() == 1 ? directory.path() / "file" : directory.path() / "good";
    expect_error(
        [&] { fully_shard(net, {.offload = Offload::kDirectory, .offload_directory = path}); },
        {"offload_directory must be a directory", "file"});
    expect_same_state(plain_state(*net), before, 0, "unchanged");
  });
}

TEST(Offload, ADirectoryThatWouldNotBeUsedIsRefused) {
  const auto net = std::make_shared<Mlp>(8, 1, 3);
  run_world(1, [&](World&) {
    expect_error(
        [&] { fully_shard(net, {.offload = Offload::kHost, .offload_directory = "/some/where"}); },
        {"offload_directory needs Offload::kDirectory", "/some/where"});
  });
}

TEST(Offload, TooLittleRoomIsAnErrorAtTheStart) {
  const ScratchDirectory directory;
  const auto memory = mapped_directory(directory.path());
  // More than any file may hold: a disk that is really full would fail other tests.
  expect_error([&] { memory->reserve({int64_t{1} << 60}); },
               {"could not make a file of", directory.path()});
}

TEST(Offload, OptimizersWhoseStateCannotBeReadAreRefused) {
  struct Own : torch::optim::Optimizer {
    explicit Own(std::vector<torch::Tensor> params)
        : Optimizer({torch::optim::OptimizerParamGroup(std::move(params))},
                    std::make_unique<torch::optim::SGDOptions>(0.1)) {}
    torch::Tensor step(LossClosure) override { return {}; }
  };
  run_world(2, [](World&) {
    const auto net = std::make_shared<Mlp>(8, 1, 3);
    auto sharded = fully_shard(net, {.offload = Offload::kHost});
    Own own(net->parameters());
    expect_error([&] { ShardedOptimizer(sharded, own, {.elementwise = true}); },
                 {"Adagrad, Adam, AdamW, CPUAdam, Muon, RMSprop and SGD"});
  });
}

}  // namespace tessera::testing::offload_test
