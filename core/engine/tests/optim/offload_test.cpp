// Master weights and optimizer state in host memory or in files.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace offload_test {

using namespace testing;

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;

TrainingRun adamw_run() {
  auto run = sgd_run<Mlp>(kWidth, 3, kOut);
  run.make_optimizer = [](Net& net) {
    return std::make_unique<torch::optim::AdamW>(net.parameters(),
                                                 torch::optim::AdamWOptions(1e-2));
  };
  return run;
}

TEST(Offload, GivesTheSameBitsAtEveryLevelPlaceAndPrecision) {
  const ScratchDirectory directory;
  for (TrainingRun run : {adamw_run(), sgd_run<Mlp>(kWidth, 3, kOut)}) {
    run.steps = 3;
    const auto train = [&](World& world, const ShardPlan& plan) {
      return train_sharded(run, world, plan, {.fused = true});
    };
    for (const int ranks : {1, 2, 3}) {
      run_world(ranks, [&](World& world) {
        for (const ShardLevel level : kAllLevels) {
          for (const auto param_dtype : {at::kFloat, at::kDouble}) {
            // In a double model, the float masters are replaced by the model's own dtype: no copy
            // but the offloaded one.
            ShardPlan plan{.level = level, .unit_bytes = 6000};
            if (param_dtype == at::kDouble && level != ShardLevel::kParameters)
              plan.partition = Partition::kWholeParam;
            const auto expected = train(world, plan);
            for (const auto offload : {Offload::kHost, Offload::kDirectory}) {
              plan.offload = offload;
              if (offload == Offload::kDirectory)
                plan.offload_directory = directory.path() / "made" / "when_needed";
              expect_same_state(
                  train(world, plan), expected, 0,
                  fmt::format("{} ranks, level {}, offload {}", ranks, int(level), int(offload)));
            }
          }
        }
      });
    }
  }
}

TEST(Offload, OfHalfModelsGivesTheSameBits) {
  const ScratchDirectory directory;
  for (const ShardLevel level : kAllLevels) {
    run_world(2, [&](World& world) {
      std::vector<std::vector<NamedTensor>> states;
      for (const auto offload : {Offload::kNone, Offload::kHost, Offload::kDirectory}) {
        const auto net = seeded(7, [] { return std::make_shared<Mlp>(kWidth, 3, kOut); });
        net->to(torch::kBFloat16);
        torch::optim::AdamW inner(net->parameters(), torch::optim::AdamWOptions(1e-2));
        auto sharded = fully_shard(net, {.level = level,
                                         .unit_bytes = 3000,
                                         .precision = {.master_dtype = at::kFloat},
                                         .offload = offload,
                                         .offload_directory = directory.path_for(offload)});
        ShardedOptimizer optimizer(sharded, inner);
        for (int step = 0; step < 3; ++step) {
          const Batch batch = global_batch(step, kRows, kWidth, kOut);
          optimizer.zero_grad();
          const auto out = net->forward(rows_of(batch.x, world.rank(), 2).to(torch::kBFloat16));
          out.to(torch::kFloat).pow(2).mean().backward();
          optimizer.step();
        }
        states.push_back(sharded.full_state());
      }
      expect_same_state(states[1], states[0], 0, "host");
      expect_same_state(states[2], states[0], 0, "directory");
    });
  }
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
                 {"Adagrad, Adam, AdamW, CPUAdam, RMSprop and SGD"});
  });
}

}  // namespace offload_test
}  // namespace tessera
