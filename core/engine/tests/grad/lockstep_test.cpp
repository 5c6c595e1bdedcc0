// Ranks that skip a step, a backward or a batch; and loops that differ between ranks and are right.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/error_of.h"
#include "support/sharded_job.h"
#include "support/warnings.h"

namespace tessera::testing::lockstep_test {

// A sharded model with its optimizer, on one rank.
struct Job : ShardedJob<Mlp> {
  Job(World& world, ShardLevel level)
      : ShardedJob(run_by<Mlp, torch::optim::SGD>(torch::optim::SGDOptions(0.01), 8, 2, 3), world,
                   {.level = level, .unit_bytes = 300}),
        level(level) {}

  int rank() const { return world.rank(); }
  torch::Tensor loss() { return sharded.forward(torch::ones({2, 8}, test_device())).pow(2).sum(); }
  void backward() { loss().backward(); }
  void step() {
    optimizer.step();
    optimizer.zero_grad();
  }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) backward(), step();
  }

  ShardLevel level;
};

std::string others_than_1(int ranks) { return ranks == 2 ? "rank 0" : "ranks 0, 2"; }

// Runs `loop` after two steps, on levels and transports where a step waits for no other rank, so
// that only the agreement of the next backward can tell. Expects the same error on all ranks.
void expect_told(const std::function<void(Job&)>& loop,
                 const std::function<std::vector<std::string>(int ranks)>& parts) {
  struct Place {
    ShardLevel level;
    Transport transport;
  };
  for (const auto& [level, transport] :
       {Place{ShardLevel::kNone, Transport::kGloo}, Place{ShardLevel::kNone, Transport::kArena},
        Place{ShardLevel::kParameters, Transport::kGloo}}) {
    for (const int ranks : {2, 3}) {
      SCOPED_TRACE(fmt::format("{} ranks, level {}", ranks, static_cast<int>(level)));
      run_over(transport, ranks, [&, level = level](World& world) {
        Job job(world, level);
        job.train(2);
        expect_error([&] { loop(job); }, parts(ranks));
      });
    }
  }
}

TEST(Lockstep, ASkippedStepIsToldAtTheNextBackward) {
  expect_told(
      [](Job& job) {
        job.backward();
        if (job.rank() != 1) job.step();
        job.backward();
      },
      [](int ranks) {
        return std::vector<std::string>{
            "[backward]", "rank 1 is in backward 2 of step 3",
            others_than_1(ranks) + (ranks == 2 ? " is" : " are") + " in backward 1 of step 4",
            "rank 1 has skipped a step"};
      });
}

TEST(Lockstep, AnAdditionalBackwardIsTold) {
  expect_told(
      [](Job& job) {
        job.backward();
        if (job.rank() == 1) job.backward();
        if (job.rank() != 1) job.step(), job.backward();
      },
      [](int ranks) {
        return std::vector<std::string>{
            "[backward]", "rank 1 is in backward 2 of step 3",
            others_than_1(ranks) + (ranks == 2 ? " is" : " are") + " in backward 1 of step 4",
            "or made more backwards before it"};
      });
}

TEST(Lockstep, AMissingBackwardIsTold) {
  expect_told(
      [](Job& job) {
        job.backward();
        if (job.rank() == 1) job.step();
        job.backward();
      },
      [](int ranks) {
        return std::vector<std::string>{
            "[backward]", "rank 1 is in backward 1 of step 4",
            others_than_1(ranks) + (ranks == 2 ? " is" : " are") + " in backward 2 of step 3",
            others_than_1(ranks) + (ranks == 2 ? " has" : " have") + " skipped a step"};
      });
}

TEST(Lockstep, TheErrorIsGoneWhenTheRankThatWasBehindHasStepped) {
  run_over(Transport::kGloo, 2, [](World& world) {
    Job job(world, ShardLevel::kNone);
    job.backward();
    job.optimizer.step();
    expect_error(
        [&] {
          if (world.rank() == 0) job.optimizer.step();
          job.backward();
        },
        {"rank 1 is in backward 1 of step 2", "rank 0 is in backward 1 of step 3"});
    if (world.rank() == 1) job.optimizer.step();
    job.backward();
  });
}

// Where ranks share memory, a step waits for the others, and so for the one that skips it.
TEST(Lockstep, WhereRanksShareMemoryASkippedStepIsAnotherCollective) {
  TESSERA_ON_HOST_ONLY("steps in shared memory");
  for (const ShardLevel level :
       {ShardLevel::kOptimizerState, ShardLevel::kGradients, ShardLevel::kParameters}) {
    run_arena(2, [&](World& world) {
      Job job(world, level);
      job.train(2);
      expect_error(
          [&] {
            job.backward();
            if (world.rank() != 1) job.step();
            job.backward();
          },
          {fmt::format("rank {}", 1 - world.rank()), "'step'", "'which parameters were used'"});
    });
  }
}

// --- forwards

std::vector<std::string> told_warnings(const std::function<void()>& f) {
  std::vector<std::string> told;
  for (const std::string& text : warnings_of(f))
    if (text.find("[backward]") != std::string::npos) told.push_back(text);
  return told;
}

TEST(Lockstep, ABatchThatIsSkippedAfterItsForwardIsToldOnce) {
  TESSERA_ON_HOST_ONLY(
      "on a device the end of backward warns on LibTorch's thread, not to this handler");
  for (const Transport transport : kTransports) {
    for (const int ranks : {2, 3}) {
      run_over(transport, ranks, [&](World& world) {
        Job job(world, ShardLevel::kGradients);
        const auto told = told_warnings([&] {
          job.train(2);
          for (int i = 0; i < 2; ++i) {
            if (world.rank() == 1) job.loss();
            job.train(1);
          }
        });
        ASSERT_EQ(told.size(), world.rank() == 0 ? 1U : 0U);
        if (world.rank() != 0) return;
        for (const std::string& part : {std::string("in backward 1 of step 3"),
                                        std::string("rank 1 has made 2 forwards and 1 backward"),
                                        others_than_1(ranks) + (ranks == 2 ? " has" : " have") +
                                            " made 1 forward and 1 backward"})
          expect_contains(told[0], {part});
      });
    }
  }
}

// --- calls that must be the same on all ranks

TEST(Lockstep, ALearningRateOfOneRankAloneIsTold) {
  expect_told(
      [](Job& job) {
        if (job.rank() == 1) job.inner->param_groups()[0].options().set_lr(0.02);
        job.train(2);
      },
      [](int) {
        return std::vector<std::string>{"[backward]",
                                        "the same calls, with the same values",
                                        "rank 0 has a step with",
                                        "lr 0.01",
                                        "rank 1 has",
                                        "lr 0.02"};
      });
}

TEST(Lockstep, ABoundForClippingOfOneRankAloneIsTold) {
  expect_told(
      [](Job& job) {
        job.backward();
        job.optimizer.clip_grad_norm_(job.rank() == 1 ? 1 : 2);
        job.step();
        job.backward();
      },
      [](int) {
        return std::vector<std::string>{"rank 0 has clipping to norm 2",
                                        "rank 1 has clipping to norm 1"};
      });
}

TEST(Lockstep, GradientsThatOneRankAloneClearsAreTold) {
  expect_told(
      [](Job& job) {
        job.backward();
        job.optimizer.step();
        if (job.rank() == 1) job.optimizer.zero_grad();
        job.backward();
      },
      [](int) {
        return std::vector<std::string>{"rank 0 has added to", "gradients of earlier backwards",
                                        "rank 1 has nothing more"};
      });
}

TEST(Lockstep, AnAverageThatOneRankAloneUpdatesIsTold) {
  expect_told(
      [](Job& job) {
        ExponentialAverage average(job.sharded, 0.9);
        job.train(1);
        if (job.rank() == 1) average.update();
        job.train(1);
      },
      [](int) {
        return std::vector<std::string>{"rank 0 has nothing more",
                                        "rank 1 has update 1 of an average"};
      });
}

// --- loops that are right

// Runs `loop` at each of `levels`, and expects neither an error nor a warning.
// Runs `loop` at each of `levels`, and expects neither an error nor a warning.
void expect_quiet(const std::vector<ShardPlan>& levels, const std::function<void(Job&)>& loop) {
  for (const Transport transport : kTransports) {
    on_worlds(
        {2, 3}, levels,
        [&](World& world, const ShardPlan& plan) {
          Job job(world, plan.level);
          const auto told = told_warnings([&] {
            job.train(2);
            for (int i = 0; i < 3; ++i) loop(job);
            job.train(1);
          });
          EXPECT_TRUE(told.empty()) << told[0];
        },
        transport);
  }
}

const std::vector<ShardPlan> kEachLevel = at_each_level();
const std::vector<ShardPlan> kWholeParameters(kEachLevel.begin(), kEachLevel.end() - 1);

TEST(Lockstep, AccumulationIsRight) {
  expect_quiet(kEachLevel, [](Job& job) {
    for (int i = 0; i < 2; ++i) {
      const auto guard = job.sharded.no_sync();
      job.backward();
    }
    job.backward();
    job.backward();
    job.step();
  });
}

TEST(Lockstep, RanksMayMakeTheirOwnNumberOfBackwardsUnderNoSync) {
  expect_quiet(kWholeParameters, [](Job& job) {
    for (int i = 0; i < job.rank(); ++i) {
      const auto guard = job.sharded.no_sync();
      job.backward();
    }
    job.backward();
    job.step();
  });
}

TEST(Lockstep, LossesMayDifferAndAGraphMayBeUsedTwice) {
  expect_quiet(kEachLevel, [](Job& job) {
    const auto loss = job.loss();
    loss.backward({}, /*retain_graph=*/true);
    (loss * (job.rank() + 1)).backward();
    job.step();
  });
}

TEST(Lockstep, ARankMayEvaluateAlone) {
  expect_quiet(kWholeParameters, [](Job& job) {
    if (job.rank() == 1) {
      const torch::NoGradGuard no_grad;
      for (int i = 0; i < 3; ++i) job.loss();
    }
    job.train(1);
  });
}

TEST(Lockstep, AScalerMaySkipSteps) {
  expect_quiet(kEachLevel, [](Job& job) {
    GradScaler scaler;
    const double overflow = job.rank() == 1 ? INFINITY : 1;
    scaler.scale(job.loss() * overflow).backward();
    EXPECT_FALSE(scaler.step(job.optimizer));
    scaler.update();
    job.optimizer.zero_grad();
  });
}

TEST(Lockstep, StepsOfACheckpointMayDiffer) {
  expect_quiet(kEachLevel, [](Job& job) {
    job.optimizer.set_steps(100 * job.rank());
    job.train(1);
  });
}

TEST(Lockstep, ModelsAreComparedEachByItself) {
  expect_quiet(kEachLevel, [](Job& job) {
    Job critic(job.world, job.level);
    for (int i = 0; i < 3; ++i) {
      (critic.loss() + critic.loss()).backward();
      critic.step();
      if (i == 1) job.train(1);
    }
  });
}

TEST(Lockstep, OptimizersOfOneModelMayStepInTurns) {
  for (const Transport transport : kTransports)
    on_worlds(
        {2}, {{.level = ShardLevel::kGradients, .unit_bytes = 300}},
        [](World&, const ShardPlan& plan) {
          const auto net = seeded(7, [] { return std::make_shared<Mlp>(8, 2, 3); });
          auto sharded = fully_shard(net, plan);
          std::vector<torch::Tensor> rest;
          for (const auto& param : net->named_parameters())
            if (!param.key().starts_with("head")) rest.push_back(param.value());
          torch::optim::SGD first(rest, 0.01), second(net->head->parameters(), 0.01);
          ShardedOptimizer one(sharded, first), two(sharded, second);
          for (int i = 0; i < 6; ++i) {
            sharded.forward(torch::ones({2, 8}, test_device())).sum().backward();
            one.step();
            if (i % 3 == 2) two.step(), sharded.zero_grad();
          }
        },
        transport);
}

TEST(Lockstep, RanksThatAreDoneAreNotBehind) {
  for (const Transport transport : kTransports) {
    run_over(transport, 3, [](World& world) {
      Job job(world, ShardLevel::kGradients);
      const auto told = told_warnings([&] {
        join(job.sharded, {&job.optimizer}, [&] { job.train(1 + 2 * world.rank()); });
        job.train(2);
      });
      EXPECT_TRUE(told.empty()) << told[0];
    });
  }
}

}  // namespace tessera::testing::lockstep_test
