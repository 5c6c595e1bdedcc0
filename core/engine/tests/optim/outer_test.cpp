// Replicas that train by themselves and are averaged every few steps.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/engine/join.h>

#include <cmath>

#include "engine/tests/optim/outer_job.h"
#include "support/contract.h"
#include "support/scratch_directory.h"

namespace tessera::testing::outer_test {

std::vector<torch::Tensor> trained(Net& net) {
  std::vector<torch::Tensor> result;
  for (const auto& param : distinct_parameters(net))
    if (param.requires_grad()) result.push_back(param);
  return result;
}

// One replica in one process: a model, and float copies of its parameters, which are stepped.
struct Replica {
  explicit Replica(const OuterRun& run) : run(run), net(run.make_net()), params(trained(*net)) {
    for (const auto& param : params)
      masters.push_back(param.detach().to(torch::kFloat, false, true).requires_grad_());
    optimizer = run.make_optimizer(masters);
  }
  void step(int step, int first_rank) {
    optimizer->zero_grad();
    net->zero_grad();
    const Batch batch = global_batch(step, kRows, kWidth, kOut);
    for (int rank = first_rank; rank < first_rank + run.shards; ++rank)
      (rank_loss(*net, batch, rank, run.ranks(), step) / run.shards).backward();
    for (size_t i = 0; i < params.size(); ++i)
      if (params[i].grad().defined())
        masters[i].mutable_grad() = params[i].grad().to(torch::kFloat);
    optimizer->step();
    show();
  }
  void show() {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(masters[i]);
  }

  const OuterRun& run;
  std::shared_ptr<Net> net;
  std::vector<torch::Tensor> params, masters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

// The outer step by `torch::optim::SGD`, which has the start values as parameters.
struct Server {
  Server(std::vector<Replica>& replicas, const OuterStep& outer) : replicas(replicas) {
    for (const auto& master : replicas.front().masters)
      start.push_back(master.detach().clone().requires_grad_());
    optimizer = std::make_unique<torch::optim::SGD>(
        start, torch::optim::SGDOptions(outer.learning_rate)
                   .momentum(outer.momentum)
                   .nesterov(outer.nesterov && outer.momentum > 0));
  }
  void average() {
    torch::NoGradGuard no_grad;
    const auto count = static_cast<double>(replicas.size());
    for (size_t i = 0; i < start.size(); ++i) {
      torch::Tensor sum = torch::zeros_like(start[i]);
      for (Replica& replica : replicas) sum += start[i] - replica.masters[i];
      start[i].mutable_grad() = sum / count;
    }
    optimizer->step();
    for (Replica& replica : replicas) {
      for (size_t i = 0; i < start.size(); ++i) replica.masters[i].copy_(start[i]);
      replica.show();
    }
  }

  std::vector<Replica>& replicas;
  std::vector<torch::Tensor> start;
  std::unique_ptr<torch::optim::SGD> optimizer;
};

// The states of all replicas after each step.
std::vector<std::vector<State>> simulate(const OuterRun& run, const OuterStep& outer) {
  std::vector<Replica> replicas;
  for (int i = 0; i < run.replicas; ++i) replicas.emplace_back(run);
  Server server(replicas, outer);
  std::vector<std::vector<State>> states;
  for (int step = 0; step < run.steps; ++step) {
    for (int i = 0; i < run.replicas; ++i) replicas[i].step(step, i * run.shards);
    if ((step + 1) % outer.every == 0) server.average();
    for (auto& of_replica = states.emplace_back(); const Replica& replica : replicas)
      of_replica.push_back(plain_state(*replica.net));
  }
  return states;
}

// Expects what the simulation has after each step, equal bits of all ranks of a replica, and of all
// replicas after each average; and that replicas differ in between.
void expect_simulated(const OuterRun& run, const std::vector<ParityCase>& cases,
                      std::optional<Transport> transport = std::nullopt) {
  // By case, rank and step.
  std::vector<std::vector<std::vector<State>>> states(cases.size(),
                                                      std::vector<std::vector<State>>(run.ranks()));
  run_world(
      run.ranks(),
      [&](World& world) {
        for (size_t i = 0; i < cases.size(); ++i) {
          OuterJob job(world, run, cases[i].plan);
          for (int step = 0; step < run.steps; ++step) {
            job.step(step);
            EXPECT_EQ(job.optimizer.steps_since_average(), (step + 1) % cases[i].plan.outer->every);
            states[i][world.rank()].push_back(job.state());
          }
        }
      },
      std::chrono::seconds(30), transport);
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto expected = simulate(run, *cases[i].plan.outer);
    const double tolerance = cases[i].tolerance < 0 ? 4e-6 : cases[i].tolerance;
    for (int step = 0; step < run.steps; ++step) {
      const std::string what = fmt::format("{}, step {}", cases[i].what, step);
      for (int rank = 0; rank < run.ranks(); ++rank) {
        const State& state = states[i][rank][step];
        const int replica = rank / run.shards;
        expect_same_state(state, expected[step][replica], tolerance, what);
        expect_same_state(state, states[i][replica * run.shards][step], 0, what + ", ranks");
        if ((step + 1) % cases[i].plan.outer->every == 0)
          expect_same_state(state, states[i][0][step], 0, what + ", replicas");
      }
      if ((step + 1) % cases[i].plan.outer->every != 0) {
        const auto first = states[i].front()[step][0].tensor.cpu();
        EXPECT_FALSE(first.equal(states[i].back()[step][0].tensor.cpu()))
            << what << ": replicas see other data";
      }
    }
  }
}

TEST(Outer, EqualsASimulationInOneProcessAtEveryStepAndLevel) {
  for (const int shards : {1, 2}) {
    for (const auto& [name, make] : {std::pair("SGD", kSgd), std::pair("AdamW", kAdamW)}) {
      const OuterRun run{.make_optimizer = make, .shards = shards};
      std::vector<ParityCase> cases;
      for (const ShardPlan& plan : at_each_level({.unit_bytes = 6000})) {
        for (const OuterStep& outer :
             {OuterStep{.every = 1}, OuterStep{.every = 3},
              OuterStep{.every = 3, .learning_rate = 0.9, .momentum = 0.5, .nesterov = false},
              OuterStep{.every = 3, .learning_rate = 1, .momentum = 0},
              OuterStep{.every = 3, .learning_rate = 0.5, .momentum = 0}}) {
          cases.push_back(
              {plan, fmt::format("replicas of {}, {}, level {}, every {}, lr {}", shards, name,
                                 int(plan.level), outer.every, outer.learning_rate)});
          cases.back().plan.outer = outer;
        }
      }
      expect_simulated(run, cases);
    }
  }
}

TEST(Outer, ThreeReplicasAndRanksThatShareMemoryGiveTheSimulatedResult) {
  std::vector<ParityCase> cases;
  for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kParameters})
    cases.push_back({{.level = level, .unit_bytes = 6000, .outer = OuterStep{.every = 2}},
                     fmt::format("level {}", int(level))});
  expect_simulated({.replicas = 3, .steps = 4}, cases);
  expect_simulated({.shards = 2, .steps = 4}, cases, Transport::kArena);
}

// Tied, frozen, tiny and unused parameters; one of them is used by the second replica alone.
struct Kinds : Net {
  Kinds() {
    for (auto* layer : {&first, &frozen, &never, &second})
      *layer = torch::nn::Linear(kWidth, kWidth);
    for (auto& param : frozen->parameters()) param.requires_grad_(false);
    register_module("first", first);
    tied = register_parameter("tied", first->weight);
    register_module("frozen", frozen), register_module("never", never);
    register_module("second", second), register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = frozen(torch::tanh(first(x)).matmul(tied));
    if (rank > 0) x = second(x);
    return head(x);
  }
  torch::nn::Linear first{nullptr}, frozen{nullptr}, never{nullptr}, second{nullptr},
      head{kWidth, kOut};
  torch::Tensor tied;
};

TEST(Outer, TiedFrozenAndUnusedParametersInEveryPlaceGiveTheSimulatedResult) {
  const ScratchDirectory directory;
  OuterRun run;
  run.make_net = [] { return seeded(5, [] { return std::make_shared<Kinds>(); }); };
  for (const int shards : {1, 2}) {
    run.shards = shards;
    std::vector<ParityCase> cases;
    for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
      for (const auto offload : {Offload::kNone, Offload::kHost, Offload::kDirectory}) {
        for (const int64_t unit_bytes : {0, 20000}) {
          ShardPlan plan{.partition = partition, .unit_bytes = unit_bytes};
          plan.outer = OuterStep{.every = 3};
          plan.offload = offload;
          if (offload == Offload::kDirectory) plan.offload_directory = directory.path();
          cases.push_back(
              {plan, fmt::format("replicas of {}, partition {}, offload {}, units of {}", shards,
                                 int(partition), int(offload), unit_bytes)});
        }
      }
    }
    expect_simulated(run, cases);
  }
}

TEST(Outer, MasterWeightsAreAveragedAndRoundedOnce) {
  OuterRun run;
  run.make_net = in_dtype(sgd_run<Mlp>(kWidth, 2, kOut), torch::kBFloat16).make_net;
  std::vector<ParityCase> cases;
  for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kParameters}) {
    for (const auto offload : {Offload::kNone, Offload::kHost})
      cases.push_back({{.level = level,
                        .unit_bytes = 6000,
                        .outer = OuterStep{.every = 3},
                        .precision = {.master_dtype = torch::kFloat},
                        .offload = offload},
                       fmt::format("level {}, offload {}", int(level), int(offload)),
                       {.fused = false},
                       0.02});
  }
  expect_simulated(run, cases);
}

TEST(Outer, AnAverageAfterEachStepOfPlainSgdIsDataParallel) {
  OuterRun run;
  run.make_optimizer = [](std::vector<torch::Tensor> params) {
    return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1));
  };
  for (const int replicas : {2, 3}) {
    run.replicas = replicas;
    run_world(replicas, [&](World& world) {
      OuterJob expected(world, run, {.unit_bytes = 6000});
      OuterJob job(
          world, run,
          {.unit_bytes = 6000, .outer = OuterStep{.every = 1, .learning_rate = 1, .momentum = 0}});
      for (int step = 0; step < 5; ++step) {
        expected.step(step);
        job.step(step);
      }
      expect_same_state(job.state(), expected.state(), 4e-6, fmt::format("{} replicas", replicas));
    });
  }
}

TEST(Outer, OneRankPerReplicaNeedsNoProcessGroupMadeForIt) {
  const OuterRun run;
  run_world(2, [&](World& world) {
    ShardedJob job(training_of(run), world,
                   {.process_group = single_process_group(),
                    .replicate_group = world.process_group(),
                    .outer = OuterStep{.every = 2}});
    job.train(0, 4);
    expect_same_state(job.state(), simulate(run, {.every = 2})[3][0], 4e-6, "world");
  });
}

TEST(Outer, SendsNothingToReplicasBetweenAveragesAndTwiceThePartLessAShareThen) {
  for (const int shards : {1, 2}) {
    for (const ShardLevel level :
         {ShardLevel::kNone, ShardLevel::kGradients, ShardLevel::kParameters}) {
      const OuterRun run{.shards = shards};
      run_world(run.ranks(), [&](World& world) {
        OuterJob job(world, run,
                     {.level = level, .unit_bytes = 6000, .outer = OuterStep{.every = 3}},
                     {.max_grad_norm = 0.5});
        GradScaler scaler;
        int64_t bytes = 0, units = 0;
        for (const auto& unit : job.sharded.state()->units()) {
          const int64_t numel = unit->updated().numel();
          bytes += 4 * numel;  // 2 (R - 1) / R of it for R = 2
          units += numel > 0;
        }
        for (int step = 0; step < 6; ++step) {
          job.replicate->reset_counts();
          job.optimizer.zero_grad();
          scaler.scale(job.loss(step)).backward();
          scaler.step(job.optimizer);
          scaler.update();
          const auto counts = job.replicate->counts();
          const bool averages = step % 3 == 2;
          EXPECT_EQ(counts.calls(), averages ? units : 0) << "step " << step;
          EXPECT_EQ(counts.all_reduce.calls, averages ? units : 0) << "step " << step;
          EXPECT_EQ(counts.bytes_sent(), averages ? bytes : 0) << "step " << step;
        }
        if (shards > 1) {
          EXPECT_GT(job.shard->counts().reduce_scatter.bytes_sent, 0);
        }
      });
    }
  }
}

TEST(Outer, TwentyStepsSendATwentiethOfTheReductionsOfGradients) {
  run_world(2, [](World& world) {
    const auto bytes_of = [&](std::optional<OuterStep> outer) {
      OuterJob job(world, {}, {.level = ShardLevel::kNone, .outer = outer});
      job.train(0, 20);
      return job.shard->counts().bytes_sent() + job.replicate->counts().bytes_sent();
    };
    EXPECT_LE(15 * bytes_of(OuterStep{.every = 20}), bytes_of(std::nullopt));
  });
}

TEST(Outer, ClippingIsEachReplicasOwn) {
  std::vector<double> norms(4);
  run_world(4, [&](World& world) {
    OuterJob job(world, {.shards = 2}, {.outer = OuterStep{.every = 2}});
    job.backward(0);
    norms[world.rank()] = job.optimizer.clip_grad_norm_(1e-3);
  });
  EXPECT_EQ(norms[0], norms[1]);
  EXPECT_EQ(norms[2], norms[3]);
  EXPECT_NE(norms[0], norms[2]);
}

TEST(Outer, AStepThatOneReplicaSkipsCountsForTheAverages) {
  std::vector<State> states(2);
  run_world(2, [&](World& world) {
    OuterJob job(world, {}, {.outer = OuterStep{.every = 2}});
    GradScaler scaler({.init_scale = 4});
    int taken = 0;
    for (int step = 0; step < 4; ++step) {
      // Replica 1 skips the first step of a round, then the last one.
      const bool overflows = world.rank() == 1 && (step == 0 || step == 3);
      job.optimizer.zero_grad();
      const auto loss = job.loss(step);
      scaler.scale(overflows ? loss * INFINITY : loss).backward();
      taken += scaler.step(job.optimizer) ? 1 : 0;
      scaler.update();
      EXPECT_EQ(job.optimizer.steps_since_average(), (step + 1) % 2);
    }
    EXPECT_EQ(taken, world.rank() == 1 ? 2 : 4);
    EXPECT_EQ(job.optimizer.steps(), taken);
    states[world.rank()] = job.state();
  });
  expect_same_state(states[1], states[0], 0, "replicas");
}

TEST(Outer, MemoryCountsStartValuesAndMomentum) {
  run_world(2, [](World& world) {
    const auto bytes_of = [&](std::optional<OuterStep> outer, Offload offload) {
      OuterJob job(world, {}, {.outer = outer, .offload = offload});
      job.train(0, 2);
      return std::pair(job.optimizer.memory(), job.bytes());
    };
    const auto [without, bytes] = bytes_of(std::nullopt, Offload::kNone);
    const auto state = [&](const OuterStep& outer) {
      return bytes_of(outer, Offload::kNone).first.optimizer_state - without.optimizer_state;
    };
    EXPECT_EQ(state({.every = 2}), 2 * bytes);
    EXPECT_EQ(state({.every = 2, .momentum = 0}), bytes);
    EXPECT_EQ(state({.every = 2, .learning_rate = 1, .momentum = 0}), 0) << "only a mean is taken";
    const auto host = bytes_of(std::nullopt, Offload::kHost).first;
    const auto both = bytes_of(OuterStep{.every = 2}, Offload::kHost).first;
    EXPECT_EQ(both.optimizer_state, 0);
    EXPECT_EQ(both.offloaded - host.offloaded, 2 * bytes);
  });
}

TEST(Outer, ACheckpointOfEachReplicaContinuesWithTheSameBits) {
  const ScratchDirectory directory;
  run_world(4, [&](World& world) {
    const OuterRun run{.shards = 2};
    const ShardPlan plan{.unit_bytes = 6000, .outer = OuterStep{.every = 2}};
    OuterJob job(world, run, plan);
    const auto path = directory.path() / fmt::format("replica-{}", world.rank() / 2);
    for (int step = 0; step < 3; ++step) job.step(step);
    expect_error([&] { save_checkpoint(path, job.sharded, &job.optimizer); },
                 {"1 of the 2 steps between two averages", "the next is in 1 steps"});
    job.step(3);
    expect_error([&] { save_checkpoint(directory.path() / "one", job.sharded, &job.optimizer); },
                 {"a directory of its own", "replicas 0 and 1 save to"});
    save_checkpoint(path, job.sharded, &job.optimizer);
    for (int step = 4; step < 6; ++step) job.step(step);

    OuterJob resumed(world, run, plan);
    resumed.step(9);  // whose start values must not count
    load_checkpoint(path, resumed.sharded, &resumed.optimizer);
    EXPECT_EQ(resumed.optimizer.steps_since_average(), 0);
    EXPECT_EQ(resumed.optimizer.steps(), 4);
    for (int step = 4; step < 6; ++step) resumed.step(step);
    expect_same_state(resumed.state(), job.state(), 0, "resumed");

    OuterJob other(world, run,
                   {.partition = Partition::kWholeParam, .outer = OuterStep{.every = 2}});
    expect_error([&] { load_checkpoint(path, other.sharded, &other.optimizer); },
                 {"momentum of plan.outer", "another level, partition or units"});
    load_checkpoint(path, other.sharded, nullptr);
  });
  run_world(2, [&](World& world) {
    OuterJob smaller(world, {}, {.outer = OuterStep{.every = 2}});
    expect_error(
        [&] {
          load_checkpoint(directory.path() / "replica-0", smaller.sharded, &smaller.optimizer);
        },
        {"saved by replicas of 2 ranks", "this one has 1"});
  });
}

TEST(Outer, AReplicaThatComesLaterTakesTheCheckpointOfAnother) {
  const ScratchDirectory directory;
  OuterRun run;
  run.make_optimizer = [](std::vector<torch::Tensor> params) {
    return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1));
  };
  const OuterStep outer{.every = 2};
  // Two replicas, then three, of which the last is new, then one, after the others were lost.
  const std::vector<int> replicas = {2, 3, 1};
  std::vector<Replica> expected;
  expected.reserve(3);  // `Server` refers to them
  for (int i = 0; i < 2; ++i) expected.emplace_back(run);
  Server server(expected, outer);
  for (size_t part = 0; part < replicas.size(); ++part) {
    const int count = run.replicas = replicas[part];
    const int first = 4 * static_cast<int>(part);
    std::vector<State> states(count);
    run_world(count, [&](World& world) {
      const auto path = [&](size_t of_part, int replica) {
        return directory.path() / fmt::format("{}-{}", of_part, replica);
      };
      OuterJob job(world, run, {.unit_bytes = 6000, .outer = outer});
      if (part > 0)
        load_checkpoint(path(part - 1, world.rank() % replicas[part - 1]), job.sharded,
                        &job.optimizer);
      EXPECT_EQ(job.optimizer.steps(), first);
      for (int step = first; step < first + 4; ++step) job.step(step);
      save_checkpoint(path(part, world.rank()), job.sharded, &job.optimizer);
      states[world.rank()] = job.state();
    });
    while (static_cast<int>(expected.size()) > count) expected.pop_back();
    while (static_cast<int>(expected.size()) < count) {
      expected.emplace_back(run);
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < server.start.size(); ++i)
        expected.back().masters[i].copy_(server.start[i]);
      expected.back().show();
    }
    for (int step = first; step < first + 4; ++step) {
      for (int i = 0; i < count; ++i) expected[i].step(step, i);
      if (step % 2 == 1) server.average();
    }
    for (const State& state : states) {
      expect_same_state(state, states.front(), 0, fmt::format("part {}, replicas", part));
      expect_same_state(state, plain_state(*expected.front().net), 4e-6,
                        fmt::format("part {}", part));
    }
  }
}

TEST(Outer, ValuesThatAreSetBetweenAveragesBeginARound) {
  std::vector<State> states(2);
  run_world(2, [&](World& world) {
    OuterJob job(world, {}, {.outer = OuterStep{.every = 3}});
    const State before = job.state();
    for (int step = 0; step < 2; ++step) job.step(step);
    job.sharded.load_full_state(before);
    EXPECT_EQ(job.optimizer.steps_since_average(), 0);
    for (int step = 0; step < 3; ++step) job.step(step);
    EXPECT_EQ(job.optimizer.steps_since_average(), 0);
    states[world.rank()] = job.state();
  });
  expect_same_state(states[1], states[0], 0, "replicas");
}

TEST(Outer, StatesThatWouldLackTheMomentumAreRefused) {
  run_world(2, [](World& world) {
    OuterJob job(world, {}, {.outer = OuterStep{.every = 2}});
    job.step(0);
    expect_error([&] { full_state_dict(job.optimizer); }, {"full_state_dict", "1 of the 2 steps"});
    expect_error([&] { job.optimizer.unwrap(); }, {"unwrap", "1 of the 2 steps"});
    job.step(1);
    expect_error([&] { full_state_dict(job.optimizer); }, {"momentum", "save_checkpoint()"});
    job.optimizer.unwrap();
    OuterJob mean(world, {}, {.outer = OuterStep{.every = 1, .momentum = 0}});
    mean.step(0);
    full_state_dict(mean.optimizer);
  });
}

TEST(Outer, PlansThatMakeNoSenseAreRefused) {
  run_world(2, [](World& world) {
    const auto refuse = [&](ShardPlan plan, const std::vector<std::string>& parts) {
      const auto net = on_test_device(std::make_shared<Mlp>(8, 1, 3));
      const auto groups = world.hybrid_process_groups(1);
      plan.process_group = groups.shard;
      if (!plan.replicate_group) plan.replicate_group = groups.replicate;
      expect_error([&] { fully_shard(net, plan); }, parts);
    };
    refuse({.outer = OuterStep{}}, {"outer.every must be at least 1", "got 0"});
    refuse({.outer = OuterStep{.every = 1, .learning_rate = 0}}, {"outer.learning_rate", "got 0"});
    refuse({.outer = OuterStep{.every = 1, .momentum = 1}}, {"outer.momentum", "got 1"});
    OuterStep narrow{.every = 1};
    narrow.reduce_dtype = at::kInt;
    refuse({.outer = narrow},
           {"outer.reduce_dtype must be kChar (int8) or kFloat8_e4m3fn", "got Int"});
    narrow.reduce_dtype = at::kChar;
    if (tests_on_host())
      refuse({.replicate_group = make_process_group(Kind::kBackend, world), .outer = narrow},
             {"[fully_shard] plan.outer.reduce_dtype", "messages over", "can't be sent as int8"});
    expect_error(
        [&] {
          const auto net = on_test_device(std::make_shared<Mlp>(8, 1, 3));
          net->to(at::kDouble);
          const auto groups = world.hybrid_process_groups(1);
          fully_shard(net, {.process_group = groups.shard,
                            .replicate_group = groups.replicate,
                            .outer = narrow});
        },
        {"outer.reduce_dtype Char is for elements of float and bfloat16; got Double"});
    refuse({.level = ShardLevel::kNone, .reduce_gradients = false, .outer = OuterStep{.every = 1}},
           {"plan.outer needs plan.reduce_gradients"});
    refuse({.unreplicated = {"head.weight"}, .outer = OuterStep{.every = 1}},
           {"unreplicated can't go with replicate_group"});
    refuse({.outer = OuterStep{.every = world.rank() + 1}},
           {"the models and plans must be the same", "plan.outer every 1", "plan.outer every 2"});
    const auto net = on_test_device(std::make_shared<Mlp>(8, 1, 3));
    expect_error([&] { fully_shard(net, {.outer = OuterStep{.every = 1}}); },
                 {"plan.outer needs plan.replicate_group"});
    OuterJob job(world, {}, {.level = ShardLevel::kNone, .outer = OuterStep{.every = 1}});
    expect_error([&] { join(job.sharded, {&job.optimizer}, [] {}); }, {"[join]", "plan.outer"});
  });
}

}  // namespace tessera::testing::outer_test
