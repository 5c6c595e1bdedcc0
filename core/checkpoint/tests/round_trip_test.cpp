#include <cmath>
#include <tuple>

#include "checkpoint/tests/saved_job.h"

namespace tessera::testing::round_trip_test {

using torch::optim::AdamW;

// Loads into a job that was trained on something else, and continues.
void expect_loads(const Saved& saved, int ranks, const ShardPlan& plan,
                  const std::filesystem::path& again) {
  const std::string what = saved.describe() + " -> " + describe(ranks, plan);
  run_world(ranks, [&](World& world) {
    Job job(2, plan);
    job.train(7, 8);
    const auto numbers = load_checkpoint(saved.path, job.sharded, &job.optimizer).numbers;
    EXPECT_EQ(numbers.at("step"), 2) << what;
    EXPECT_EQ(job.inner.param_groups()[0].options().get_lr(), 0.005) << what;
    save_checkpoint(again, job.sharded, &job.optimizer, {.numbers = numbers});
    const auto state = job.sharded.full_state();
    job.train(2, 4);
    const auto later = job.sharded.full_state();
    if (world.rank() != 0) return;
    expect_same_state(state, saved.state, 0, what);
    expect_same_state(later, saved.later, ranks == saved.ranks ? 0 : 1e-5,
                      what + ", two steps later");
  });
  expect_same_tensors(read_all(again), read_all(saved.path), what);
}

class CheckpointSlow : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(SavedBy, CheckpointSlow,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Bool()));

TEST_P(CheckpointSlow, LoadsAtEveryWorldSizeLevelAndPartition) {
  const ScratchDirectory scratch;
  const auto [saved_ranks, whole] = GetParam();
  for (const ShardPlan& saved_plan : plans()) {
    const Saved saved = save_in_middle(saved_ranks, saved_plan, whole, scratch / "first");
    for (const int ranks : {1, 2, 3}) {
      for (const ShardPlan& plan : plans()) {
        expect_loads(saved, ranks, plan, scratch / "again");
      }
    }
  }
}

TEST(Checkpoint, GoesOnBitForBit) {
  const ScratchDirectory scratch;
  for (const bool whole : {false, true}) {
    const Saved saved = save_in_middle(2, plans()[3], whole, scratch / "first");
    expect_loads(saved, 2, plans()[3], scratch / "again");
    expect_loads(saved, 3, plans()[2], scratch / "again");
    expect_loads(saved, 1, plans()[0], scratch / "again");
  }
}

TEST(Checkpoint, LoadsIntoAFreshProgramAndBeforeTheFirstStep) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    Job job(1, plans()[3]);
    save_checkpoint(scratch / "start", job.sharded, &job.optimizer);
    const auto start = job.sharded.full_state();
    job.train(0, 2);
    const auto expected = job.sharded.full_state();
    load_checkpoint(scratch / "start", job.sharded,
                    &job.optimizer);  // clears the optimizer's state
    expect_same_state(job.sharded.full_state(), start, 0, "after the load");
    EXPECT_EQ(job.optimizer.memory().optimizer_state, 0);
    job.train(0, 2);
    expect_same_state(job.sharded.full_state(), expected, 0, "trained again");
  });
}

TEST(Checkpoint, ParametersAreUsedAsTheyWereLoaded) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    const torch::Tensor x = torch::ones({2, 3, 4, 4}, test_device());
    Job job(1, plans()[3]);
    job.module->eval();
    torch::NoGradGuard no_grad;
    const torch::Tensor expected = job.sharded(x);
    save_checkpoint(scratch / "one", job.sharded, nullptr);
    for (const ShardPlan& plan : plans()) {
      Job other(2, plan);
      other.module->eval();
      EXPECT_FALSE(torch::equal(other.sharded(x), expected));  // leaves units gathered
      load_checkpoint(scratch / "one", other.sharded, nullptr);
      EXPECT_TRUE(torch::equal(other.sharded(x), expected)) << describe(2, plan);
    }
  });
}

TEST(Checkpoint, WeightsStoredInAnotherMemoryOrderAreConverted) {
  const ScratchDirectory scratch;
  for (const ShardPlan& plan : plans()) {
    run_world(2, [&](World&) {
      Job saved(1, plan);
      saved.train(0, 1);
      save_checkpoint(scratch / "channels_last", saved.sharded, &saved.optimizer);
      auto module = make_picture(2);
      module->conv->weight.set_data(module->conv->weight.detach().contiguous());
      auto sharded = fully_shard(module, plan);
      AdamW inner(module->parameters());
      ShardedOptimizer optimizer(sharded, inner);
      load_checkpoint(scratch / "channels_last", sharded, &optimizer);
      expect_same_state(sharded.full_state(), saved.sharded.full_state(), 0, describe(2, plan));
      EXPECT_TRUE(module->conv->weight.is_contiguous());
      save_checkpoint(scratch / "contiguous", sharded, &optimizer);
    });
    const auto saved = read_all(scratch / "channels_last");
    EXPECT_FALSE(saved.at("state/exp_avg/conv.weight").is_contiguous());
    expect_same_tensors(read_all(scratch / "contiguous"), saved, describe(2, plan));
  }
}

TEST(Checkpoint, NumbersComeBackToTheBit) {
  const ScratchDirectory scratch;
  const std::map<std::string, double> numbers = {{"step", 123456789.0},
                                                 {"loss", 0.1 + 0.2},
                                                 {"best", -std::numeric_limits<double>::infinity()},
                                                 {"tiny", 5e-324},
                                                 {"odd", std::nan("")}};
  run_world(2, [&](World&) {
    auto sharded = fully_shard(make_picture(1));
    save_checkpoint(scratch / "one", sharded, nullptr, {.numbers = numbers});
    auto loaded = load_checkpoint(scratch / "one", sharded, nullptr).numbers;
    EXPECT_TRUE(std::isnan(loaded.extract("odd").mapped()));
    auto expected = numbers;
    expected.erase("odd");
    EXPECT_EQ(loaded, expected);
  });
}

// Trains, saves, loads into another job of another size, and compares the two checkpoints.
template <class Optimizer, class Options>
void expect_optimizer_comes_back(const Options& options, const Options& others, bool fused) {
  const ScratchDirectory scratch;
  auto with_job = [&](int ranks, uint64_t seed, const Options& chosen, auto&& f) {
    run_world(ranks, [&](World&) {
      auto module = make_picture(seed);
      auto sharded = fully_shard(module, plans()[3]);
      const torch::optim::OptimizerParamGroup groups[] = {
          {module->norm->parameters(), std::make_unique<Options>(chosen)},
          {{module->encode->weight, module->encode->bias, module->conv->weight},
           std::make_unique<Options>(chosen)}};
      Optimizer inner({groups[0], groups[1]}, chosen);
      ShardedOptimizer optimizer(sharded, inner, {.fused = fused});
      for (int step = 0; step < 2; ++step) train_step(*module, optimizer, step);
      f(sharded, optimizer);
    });
  };
  with_job(2, 1, options, [&](auto& sharded, auto& optimizer) {
    save_checkpoint(scratch / "first", sharded, &optimizer);
  });
  with_job(3, 2, others, [&](auto& sharded, auto& optimizer) {
    load_checkpoint(scratch / "first", sharded, &optimizer);
    save_checkpoint(scratch / "again", sharded, &optimizer);
  });
  expect_same_tensors(read_all(scratch / "again"), read_all(scratch / "first"), "optimizer");
  EXPECT_EQ(read_index(scratch / "again").at("optimizer").dump(),
            read_index(scratch / "first").at("optimizer").dump());
}

TEST(Checkpoint, KeepsTheStateAndOptionsOfEachKindOfOptimizer) {
  using namespace torch::optim;
  for (const bool fused : {true, false}) {
    expect_optimizer_comes_back<AdamW>(AdamWOptions(0.01).betas({0.8, 0.9}).amsgrad(true),
                                       AdamWOptions(0.1), fused);
    expect_optimizer_comes_back<Adam>(AdamOptions(0.01).weight_decay(0.5),
                                      AdamOptions(0.1).amsgrad(true), fused);
    expect_optimizer_comes_back<SGD>(SGDOptions(0.01).momentum(0.9).nesterov(true), SGDOptions(0.1),
                                     fused);
    expect_optimizer_comes_back<SGD>(SGDOptions(0.01), SGDOptions(0.1).momentum(0.5), fused);
    expect_optimizer_comes_back<Adagrad>(AdagradOptions(0.01).lr_decay(0.1), AdagradOptions(0.1),
                                         fused);
    expect_optimizer_comes_back<RMSprop>(RMSpropOptions(0.01).momentum(0.9).centered(true),
                                         RMSpropOptions(0.1), fused);
  }
}

}  // namespace tessera::testing::round_trip_test
