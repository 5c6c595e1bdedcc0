// The scaler of losses: its formula, agreement of all ranks, and the orders of calls.
#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>

#include <stdexcept>

#include "support/error_of.h"
#include "support/sharded_job.h"

namespace tessera::testing::grad_scaler_test {

TrainingRun sgd() {
  return run_by<Mlp, torch::optim::SGD>(torch::optim::SGDOptions(0.1), 37, 2, 5);
}

struct Job : ShardedJob<Mlp> {
  explicit Job(World& world, const ShardPlan& plan = {.unit_bytes = 6000},
               const TrainingRun& run = sgd())
      : ShardedJob(run, world, plan) {}
  torch::Tensor loss(int step) {
    optimizer.zero_grad();
    return ShardedJob::loss(step);
  }
};

template <class F>
std::string runtime_error_of(F&& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return std::string("c10: ") + error.what_without_backtrace();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

TEST(GradScaler, StepsOfScaledLossesAreThoseOfTheLosses) {
  for (const auto level : {ShardLevel::kNone, ShardLevel::kGradients, ShardLevel::kParameters}) {
    run_world(2, [&](World& world) {
      Job plain(world, {.level = level}), scaled(world, {.level = level});
      GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
      for (int step = 0; step < 4; ++step) {
        plain.loss(step).backward();
        plain.optimizer.step();
        scaler.scale(scaled.loss(step)).backward();
        EXPECT_TRUE(scaler.step(scaled.optimizer));
        scaler.update();
      }
      // Powers of two cost no bits.
      expect_same_state(scaled.state(), plain.state(), 0, "scaled");
      EXPECT_EQ(scaler.get_scale(), 4096) << "grown every second step";
    });
  }
}

// The operator is called for each dtype, and asks the ranks of its own tensors' meshes.
TEST(GradScaler, AnOverflowOnOneMeshSkipsTheStepOnOthersOfAnotherDtype) {
  for (const int overflowing : {-1, 0, 1, 2}) {
    run_world(3, [&](World& world) {
      const auto placed = [](at::ScalarType dtype, std::vector<int> ranks) {
        const auto size = static_cast<int64_t>(ranks.size());
        const DeviceMesh mesh({size}, std::move(ranks));
        const at::Tensor ones = on_test_device(torch::ones({4}, dtype));
        at::Tensor param = distribute(ones, mesh, {Shard{0}}).requires_grad_();
        param.mutable_grad() = distribute(ones, mesh, {Shard{0}});
        return param;
      };
      const std::vector<at::Tensor> params{placed(torch::kFloat, {1, 0}),
                                           placed(torch::kDouble, {2})};
      for (const at::Tensor& param : params)
        if (world.rank() == overflowing && mesh_of(param).is_member())
          to_local(param.grad()).fill_(INFINITY);
      torch::optim::SGD optimizer(params, 0.5);
      GradScaler scaler({.init_scale = 1});
      EXPECT_EQ(scaler.step(optimizer), overflowing < 0) << "rank " << overflowing;
      for (const at::Tensor& param : params)
        if (mesh_of(param).is_member())
          EXPECT_TRUE(to_local(param).detach().eq(overflowing < 0 ? 0.5 : 1).all().item<bool>());
    });
  }
}

TEST(GradScaler, AnOverflowOnOneRankSkipsTheStepOnAll) {
  for (const int ranks : {2, 3, 4}) {
    run_world(ranks, [&](World& world) {
      ShardPlan plan{.unit_bytes = 0};
      if (ranks == 4) {
        const auto process_groups = world.hybrid_process_groups(2);
        plan.process_group = process_groups.shard;
        plan.replicate_group = process_groups.replicate;
      }
      Job job(world, plan);
      GradScaler scaler({.init_scale = 8});
      const auto before = job.state();
      auto loss = job.loss(0);
      if (world.rank() == ranks - 1) loss = loss * std::numeric_limits<float>::infinity();
      scaler.scale(loss).backward();
      EXPECT_FALSE(scaler.step(job.optimizer));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 4);
      EXPECT_EQ(job.optimizer.steps(), 0);
      expect_same_state(job.state(), before, 0, "skipped");
      scaler.scale(job.loss(1)).backward();
      EXPECT_TRUE(scaler.step(job.optimizer));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 4);
      EXPECT_EQ(job.optimizer.steps(), 1);
    });
  }
}

// A gradient that is not finite lies in one rank's shard only after the reduction: every rank must
// hear of it.
TEST(GradScaler, ANonFiniteElementInOneShardIsSeenByAllRanks) {
  run_world(3, [](World& world) {
    Job job(world);
    GradScaler scaler({.init_scale = 2});
    auto loss = job.loss(0);
    const auto last = job.net->head->bias;
    const auto one_nan = on_test_device(torch::tensor({0.F, 0.F, 0.F, 0.F, std::nanf("")}));
    loss = loss + (last * one_nan).sum();
    scaler.scale(loss).backward();
    EXPECT_FALSE(scaler.step(job.optimizer));
  });
}

TEST(GradScaler, UnscalesForClippingBeforeTheStep) {
  run_world(2, [](World& world) {
    Job plain(world), scaled(world);
    GradScaler scaler({.init_scale = 256});
    plain.loss(0).backward();
    const double expected = plain.optimizer.clip_grad_norm_(0.01);
    plain.optimizer.step();
    scaler.scale(scaled.loss(0)).backward();
    scaler.unscale_(scaled.optimizer);
    EXPECT_EQ(scaled.optimizer.clip_grad_norm_(0.01), expected);
    scaler.step(scaled.optimizer);
    expect_same_state(scaled.state(), plain.state(), 0, "clipped");
  });
}

TEST(GradScaler, HalfModelsSkipUntilTheScaleFits) {
  run_world(2, [](World& world) {
    Job job(world, {.precision = {.master_dtype = at::kFloat}}, in_dtype(sgd(), torch::kHalf));
    GradScaler scaler({.init_scale = std::pow(2.0, 30)});
    int skipped = 0;
    for (int step = 0; step < 30; ++step) {
      scaler.scale(job.loss(step)).backward();
      skipped += !scaler.step(job.optimizer);
      scaler.update();
    }
    EXPECT_GT(skipped, 5);
    EXPECT_LT(skipped, 20);
    EXPECT_EQ(job.optimizer.steps(), 30 - skipped);
  });
}

TEST(GradScaler, WrongOrdersOfCallsAreRefusedWithPyTorchsWords) {
  run_world(2, [](World& world) {
    Job job(world);
    GradScaler scaler({.init_scale = 2});
    EXPECT_EQ(runtime_error_of([&] { scaler.update(); }),
              "No inf checks were recorded prior to update.");
    scaler.scale(job.loss(0)).backward();
    scaler.unscale_(job.optimizer);
    EXPECT_EQ(runtime_error_of([&] { scaler.unscale_(job.optimizer); }),
              "unscale_() has already been called on this optimizer since the last update().");
    scaler.step(job.optimizer);
    EXPECT_EQ(runtime_error_of([&] { scaler.unscale_(job.optimizer); }),
              "unscale_() is being called after step().");
    EXPECT_EQ(runtime_error_of([&] { scaler.step(job.optimizer); }),
              "step() has already been called since the last update().");
    EXPECT_EQ(runtime_error_of([&] { scaler.step(job.optimizer, [] { return torch::ones({}); }); }),
              "Closure use is not currently supported if GradScaler is enabled.");
    scaler.update();
    scaler.scale(job.loss(1)).backward();
    EXPECT_TRUE(scaler.step(job.optimizer));
    scaler.update();
    scaler.scale(job.loss(2));
    expect_contains(runtime_error_of([&] { scaler.unscale_(job.optimizer); }),
                    {"there must be a backward since the last zero_grad()"});
  });
}

// The step would divide by a scale that the gradients don't have.
TEST(GradScaler, AStepOfALossThatWasNotScaledIsRefused) {
  run_world(2, [](World& world) {
    Job job(world);
    GradScaler scaler({.init_scale = 65536});
    const auto refuses = [&](int step) {
      const auto before = job.state();
      job.loss(step).backward();
      expect_contains(runtime_error_of([&] { scaler.step(job.optimizer); }),
                      {"Attempted step but no loss was scaled since the last update"});
      expect_contains(runtime_error_of([&] { scaler.unscale_(job.optimizer); }),
                      {"Attempted unscale_ but no loss was scaled"});
      expect_same_state(job.state(), before, 0, "refused");
    };
    refuses(0);
    scaler.scale(job.loss(1)).backward();
    EXPECT_TRUE(scaler.step(job.optimizer));
    scaler.update();
    refuses(2);
    GradScaler unscaled({.init_scale = 1});  // does not change a loss
    job.loss(3).backward();
    EXPECT_TRUE(unscaled.step(job.optimizer));
  });
}

TEST(GradScaler, SeveralOptimizersShareOneScale) {
  run_world(2, [](World& world) {
    const auto net = std::static_pointer_cast<Mlp>(sgd().make_net());
    torch::optim::SGD first(net->head->parameters(), torch::optim::SGDOptions(0.1));
    torch::optim::SGD second(net->norm->parameters(), torch::optim::SGDOptions(0.1));
    auto sharded = fully_shard(net, {});
    ShardedOptimizer one(sharded, first), two(sharded, second);
    GradScaler scaler({.init_scale = 8});
    const Batch batch = global_batch(0, 12, 37, 5);
    auto loss = rank_loss(*net, batch, world.rank(), 2, 0);
    loss = loss + (net->norm->weight * std::numeric_limits<float>::infinity()).sum();
    scaler.scale(loss).backward();
    EXPECT_TRUE(scaler.step(one));
    EXPECT_FALSE(scaler.step(two));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
  });
}

TEST(GradScaler, DisabledItIsNotThere) {
  run_world(2, [](World& world) {
    Job plain(world), other(world);
    GradScaler scaler({.enabled = false});
    plain.loss(0).backward();
    plain.optimizer.step();
    scaler.scale(other.loss(0)).backward();
    scaler.unscale_(other.optimizer);
    EXPECT_TRUE(scaler.step(other.optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 1);
    EXPECT_TRUE(scaler.state().empty());
    expect_same_state(other.state(), plain.state(), 0, "disabled");
  });
}

TEST(GradScaler, ScalesListsAndTakesNewScales) {
  GradScaler scaler({.init_scale = 4});
  const auto scaled =
      scaler.scale(std::vector<torch::Tensor>{torch::ones({2}), torch::full({}, 3.0)});
  EXPECT_TRUE(scaled[0].equal(torch::full({2}, 4.0)));
  EXPECT_EQ(scaled[1].item<double>(), 12);
  EXPECT_EQ(scaler.scale(torch::ones({}, torch::kHalf)).scalar_type(), at::kFloat);
  scaler.update(32.0);
  EXPECT_EQ(scaler.get_scale(), 32);
  scaler.update(torch::full({1}, 2.0));
  EXPECT_EQ(scaler.get_scale(), 2);
  expect_error([&] { scaler.update(torch::ones({2})); }, {"one element"});
  expect_error([&] { scaler.update(-1.0); }, {"new_scale must be positive"});
  expect_error([] { GradScaler({.growth_factor = 0.5}); }, {"growth_factor must be above 1"});
  expect_error([] { GradScaler({.backoff_factor = 2}); }, {"backoff_factor"});
}

TEST(GradScaler, StateGoesOnWhereItWas) {
  run_world(2, [](World& world) {
    Job job(world);
    GradScaler scaler({.init_scale = 64, .growth_interval = 3});
    for (int step = 0; step < 2; ++step) {
      scaler.scale(job.loss(step)).backward();
      scaler.step(job.optimizer);
      scaler.update();
    }
    GradScaler resumed;
    resumed.load_state(scaler.state());
    EXPECT_EQ(resumed.state(), scaler.state());
    resumed.scale(job.loss(2)).backward();
    resumed.step(job.optimizer);
    resumed.update();
    EXPECT_EQ(resumed.get_scale(), 128) << "the third step without an overflow";
    expect_error([&] { resumed.load_state({{"scale", 1.0}}); }, {"'growth_factor'"});
  });
}

}  // namespace tessera::testing::grad_scaler_test
