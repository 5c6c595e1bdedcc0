// The order of use: learned, different from registration, changing, different between ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "support/counted_job.h"

namespace tessera::testing::order_test {

// Layers between a first and a last one; each forward uses those that `choose` returns, in that
// order.
struct Choosing : Net {
  using Choice = std::function<std::vector<int>(int rank, int step)>;
  explicit Choosing(Choice choose) : choose(std::move(choose)) {
    first = register_module("first", torch::nn::Linear(37, 37));
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(37, 37)));
    }
    last = register_module("last", torch::nn::Linear(37, 5));
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::gelu(first->forward(x));
    for (const int i : choose(rank, step)) x = torch::gelu(layers[i]->forward(x));
    return last->forward(x);
  }
  Choice choose;
  torch::nn::Linear first{nullptr}, last{nullptr};
  std::vector<torch::nn::Linear> layers;
};

TrainingRun choosing_run(const Choosing::Choice& choose) {
  // Weight decay would move a parameter that the step does not use.
  TrainingRun run = run_by<Choosing, torch::optim::AdamW>(
      torch::optim::AdamWOptions(1e-2).weight_decay(0.1), choose);
  run.steps = 6;
  return run;
}

// What a rank uses in a step.
struct Program {
  const char* name;
  Choosing::Choice choose;
};
using Chosen = std::vector<int>;
const std::vector<Program> kPrograms = {
    {"DiffersFromRegistration",
     [](int, int) {
       return Chosen{2, 0, 3, 1};
     }},
    {"UsesAUnitSeveralTimes", [](int, int) { return Chosen{1, 2, 1, 1, 0, 2, 3}; }},
    {"ChangesBetweenSteps",
     [](int, int step) {
       return step % 2 ? Chosen{3, 1, 0} : Chosen{0, 1, 2, 3};
     }},
    {"LeavesPartsUnusedOnAllRanksForAWhile",
     [](int, int step) {
       return step < 3 ? Chosen{0, 1} : Chosen{0, 1, 2, 3};
     }},
    {"HasBranchesWhichAlternateBetweenRanks",
     [](int rank, int step) {
       return (rank + step) % 2 ? Chosen{0, 1, 3} : Chosen{0, 2, 3};
     }},
    {"UsesAUnitThatNoneUsedBefore",
     [](int rank, int step) {
       Chosen choice = {0};
       if (step >= 2 && rank == 0) choice.push_back(1);
       if (step >= 3 && rank == 1) choice.push_back(2);
       if (step == 4) choice.push_back(3);
       return choice;
     }},
};

class OrderOfUse : public ::testing::TestWithParam<Program> {};
INSTANTIATE_TEST_SUITE_P(That, OrderOfUse, ::testing::ValuesIn(kPrograms),
                         [](const auto& info) { return info.param.name; });

TEST_P(OrderOfUse, GivesTheResultOfOneProcess) {
  std::vector<ShardPlan> plans(4, {.unit_bytes = 6000});
  plans[0].level = ShardLevel::kGradients;
  for (const int prefetch : {0, 1, 2}) plans[1 + prefetch].prefetch = prefetch;
  for (const int ranks : {1, 2, 3, 4})
    expect_parity_of_each(choosing_run(GetParam().choose), ranks,
                          cases_of(plans, ranks == 3 ? 2e-5 : 0));
}

// The all-gathers of each of some steps.
template <class N>
std::vector<int64_t> gathers_of(CountedJob<N>& job, int first, int last) {
  std::vector<int64_t> gathers;
  for (int step = first; step < last; ++step)
    gathers.push_back(job.count_step(step).all_gather.calls);
  return gathers;
}

TEST(Order, IsLearnedOnceIfPassesAreAlike) {
  run_world(2, [&](World& world) {
    const Choosing::Choice choose = [](int, int) { return Chosen{2, 0, 3, 1}; };
    CountedJob job(sgd_run<Choosing>(choose), world, {.unit_bytes = 6000});
    std::vector<int64_t> gathers;
    for (int step = 0; step < 5; ++step) {
      const CollectiveCounts counts = job.count_step(step);
      gathers.push_back(counts.all_gather.calls);
      // The first step asks for each use that registration order does not expect.
      if (step > 0) {
        EXPECT_EQ(counts.all_reduce.calls, 1);
      }
    }
    const UseOrder expected = {0, 3, 1, 4, 2, 5};
    const PassOrder& order = job.sharded.state()->residency().order();
    EXPECT_EQ(order.forward, expected);
    EXPECT_EQ(order.backward, (UseOrder{5, 2, 4, 1, 3}));
    // Six units forward, three again in backward: the last two are still gathered, and backward
    // does not read the first one, as the input needs no gradient.
    for (int step = 1; step < 5; ++step) EXPECT_EQ(gathers[step], 9) << "step " << step;
  });
}

TEST(Order, AnAbandonedForwardDoesNotGrowTheTrafficOfLaterSteps) {
  run_world(2, [&](World& world) {
    CountedJob<Mlp> job(sgd_run<Mlp>(), world, {.unit_bytes = 6000});
    const auto before = gathers_of(job, 0, 3);
    job.sharded.forward(on_test_device(torch::ones({2, 37})));  // no backward follows
    EXPECT_EQ(gathers_of(job, 3, 7).back(), before.back());
  });
}

// Reads its weights without gradients, at one of several points of the forward.
struct Watching : Net {
  explicit Watching(int when) : when(when) {
    for (int i = 0; i < 6; ++i)
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(37, i == 5 ? 5 : 37)));
  }
  void look(torch::nn::Linear& layer) {
    torch::NoGradGuard no_grad;
    norms += layer->weight.norm();
  }
  torch::Tensor forward(torch::Tensor x) override {
    for (size_t i = 0; i < layers.size(); ++i) {
      if (when == 1) look(layers[i]);
      x = layers[i]->forward(x);
      if (when == 2) look(layers[i]);
      if (when == 3 && i > 0) look(layers[i - 1]);
      if (i + 1 < layers.size()) x = torch::gelu(x);
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  torch::Tensor norms = on_test_device(torch::zeros({}));
  int when;
};

std::vector<int64_t> gathers_of(World& world, int when, int steps) {
  CountedJob job(sgd_run<Watching>(when), world, {.unit_bytes = 6000});
  return gathers_of(job, 0, steps);
}

TEST(Order, AForwardThatLooksAtItsWeightsWithoutGradientsGathersNothingMore) {
  run_world(2, [](World& world) {
    const int64_t plain = gathers_of(world, 0, 4).back();
    EXPECT_EQ(gathers_of(world, 1, 4), gathers_of(world, 0, 4)) << "before each layer";
    EXPECT_EQ(gathers_of(world, 2, 4), gathers_of(world, 0, 4)) << "after each layer";
    // The window of two units does not hold the previous unit, so each is gathered once more.
    EXPECT_LE(gathers_of(world, 3, 4).back(), 3 * plain) << "one layer later";
  });
}

// A part that is frozen and runs without gradients.
TEST(Order, AForwardThatBeginsWithoutGradientsIsOnePass) {
  run_world(2, [](World& world) {
    auto counter = counting_process_group(world.process_group());
    const auto body =
        on_test_device(std::make_shared<Choosing>([](int, int) { return std::vector<int>{}; }));
    torch::optim::SGD inner(body->last->parameters(), 0.1);
    auto sharded = fully_shard(body, {.unit_bytes = 6000, .process_group = counter});
    ShardedOptimizer optimizer(sharded, inner);
    for (int step = 0; step < 4; ++step) {
      counter->reset_counts();
      torch::Tensor x = on_test_device(torch::ones({3, 37}));
      {
        torch::NoGradGuard no_grad;
        x = body->first->forward(x);
        for (auto& layer : body->layers) x = torch::gelu(layer->forward(x));
      }
      optimizer.zero_grad();
      body->last->forward(x).sum().backward();
      optimizer.step();
      if (step < 2) continue;
      EXPECT_EQ(counter->counts().all_gather.calls, 6) << "step " << step;
    }
  });
}

// Evaluation passes between steps, in which ranks may take different branches.
TEST(Order, EvaluationBetweenStepsChangesNothing) {
  const Choosing::Choice choose = [](int rank, int step) {
    return (rank + step) % 2 ? std::vector<int>{0, 1, 3} : std::vector<int>{0, 2};
  };
  const TrainingRun run = choosing_run(choose);
  const auto expected = train_alone(run, 2);
  for (const int64_t resident : {-1, 0, 9000}) {
    run_world(2, [&](World& world) {
      ShardedJob job(run, world, {.unit_bytes = 6000, .resident_bytes = resident});
      const auto evaluate = [&](int times, int shift) {
        torch::NoGradGuard no_grad;
        for (int i = 0; i < times; ++i) {
          rank_loss(*job.net, global_batch(50 + i, run.rows, run.in, run.out), world.rank(),
                    world.size(), i + shift);
        }
      };
      for (int step = 0; step < run.steps; ++step) {
        evaluate(step % 3, step);
        job.optimizer.zero_grad();
        const auto loss = job.loss(step);
        if (step % 2) evaluate(1, step);
        loss.backward();
        evaluate(1, step + 1);
        job.optimizer.step();
        if (step == 2) job.state();
        evaluate(1, step);
      }
      expect_same_state(job.state(), expected, 0, fmt::format("resident {}", resident));
    });
  }
}

TEST(Order, AnExceptionInForwardLeavesTheModelUsable) {
  const TrainingRun run = sgd_run<Mlp>(37, 3, 5);
  for (const int ranks : {1, 2, 3}) {
    const auto expected = train_alone(run, ranks);
    on_worlds({ranks}, at_each_level({.unit_bytes = 6000}),
              [&](World& world, const ShardPlan& plan) {
                ShardedJob<Mlp> job(run, world, plan);
                for (int step = 0; step < run.steps; ++step) {
                  job.optimizer.zero_grad();
                  const auto x = on_test_device(torch::ones({2, 37}));
                  auto& fcs = job.net->fcs;
                  EXPECT_THROW(fcs[1]->forward(fcs[0]->forward(x).narrow(1, 0, 3)), c10::Error);
                  job.backward(step);
                  if (step % 2) {
                    EXPECT_THROW(job.sharded.forward(x.narrow(1, 0, 3)), c10::Error);
                  }
                  job.optimizer.step();
                }
                expect_same_state(job.state(), expected, tolerance_of(ranks), "after exceptions");
              });
  }
}

}  // namespace tessera::testing::order_test
