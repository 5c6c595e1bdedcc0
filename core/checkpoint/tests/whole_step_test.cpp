// Optimizers that need whole parameters, in checkpoints: to the bit at any number of ranks.
#include "checkpoint/tests/saved_job.h"
#include "support/whole_optimizers.h"

namespace tessera::testing::whole_step_test {

// Ways to place the parameters of an optimizer: as the rules say, all whole, with other owners.
std::vector<ShardPlan> placements_for(const WholeOptimizer& optimizer, int ranks) {
  std::vector<ShardPlan> plans{
      {.unit_bytes = 900, .cuts = optimizer.cuts},
      {.level = ShardLevel::kNone, .cuts = optimizer.cuts},
      {.level = ShardLevel::kOptimizerState, .partition = Partition::kWholeParam},
      {.level = ShardLevel::kGradients, .unit_bytes = 0, .cuts = kAllWhole},
      {.unit_bytes = 900, .cuts = optimizer.cuts, .offload = Offload::kHost}};
  for (const auto& item : optimizer.run.make_net()->named_parameters())
    plans[3].owners[item.key()] = ranks - 1;
  if (!tests_on_host()) plans.pop_back();
  for (ShardPlan& plan : plans) plan.average = false;
  return plans;
}

// AdamW's kernels of a device handle the ends of parts in another way.
const double kTolerance = tests_on_host() ? 0 : 1e-5;

class WholeStepCheckpoint : public ::testing::TestWithParam<torch::Dtype> {};

TEST_P(WholeStepCheckpoint, GoesOnAtAnyNumberOfRanksAndPlacement) {
  const bool is_narrow = GetParam() == torch::kBFloat16;
  for (const WholeOptimizer& optimizer : whole_optimizers()) {
    const TrainingRun run = in_dtype(optimizer.run, GetParam());
    const auto plan_of = [&](ShardPlan plan) {
      if (is_narrow) plan.precision.master_dtype = torch::kFloat;
      return plan;
    };
    const ScratchDirectory scratch;
    State state, later;
    run_world(2, [&](World& world) {
      FirstRankJob job(run, world, plan_of(placements_for(optimizer, 2)[0]));
      job.train(0, 3);
      job.inner->param_groups()[0].options().set_lr(0.005);
      save_checkpoint(scratch / "first", job.sharded, &job.optimizer);
      const State saved = job.state();
      job.train(3, 6);
      const State end = job.state();
      if (world.rank() == 0) state = saved, later = end;
    });
    for (const int ranks : {1, 2, 3, 4}) {
      for (const ShardPlan& plan : placements_for(optimizer, ranks)) {
        const std::string what = optimizer.name + ", " + describe(ranks, plan);
        run_world(ranks, [&](World& world) {
          FirstRankJob job(run, world, plan_of(plan));
          job.train(7, 8);
          load_checkpoint(scratch / "first", job.sharded, &job.optimizer);
          EXPECT_EQ(job.inner->param_groups()[0].options().get_lr(), 0.005);
          expect_same_state(job.state(), state, 0, what);
          save_checkpoint(scratch / "again", job.sharded, &job.optimizer);
          job.train(3, 6);
          expect_same_state(job.state(), later, kTolerance, what + ", later");
        });
        expect_same_tensors(read_all(scratch / "again"), read_all(scratch / "first"), what);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(In, WholeStepCheckpoint,
                         ::testing::Values(torch::kFloat, torch::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(WholeStepsInCheckpoints, OfReplicasIsThatOfOneOfThem) {
  for (const WholeOptimizer& optimizer : whole_optimizers()) {
    const ScratchDirectory scratch;
    State later;
    run_world(4, [&](World& world) {
      const auto process_groups = world.hybrid_process_groups(2);
      ShardPlan plan = placements_for(optimizer, 2)[0];
      plan.process_group = process_groups.shard;
      plan.replicate_group = process_groups.replicate;
      FirstRankJob job(optimizer.run, world, plan);
      job.train(0, 3);
      save_checkpoint(scratch / "first", job.sharded, &job.optimizer);
      job.train(3, 5);
      const State end = job.state();
      if (world.rank() == 0) later = end;
    });
    // One process without shards.
    const auto net = optimizer.run.make_net();
    const auto inner = optimizer.run.make_optimizer(*net);
    load_checkpoint(scratch / "first", *net, inner.get());
    for (int step = 3; step < 5; ++step) {
      inner->zero_grad();
      const Batch batch = global_batch(step, optimizer.run.rows, optimizer.run.in, 5);
      rank_loss(*net, batch, 0, 1, step).backward();
      inner->step();
    }
    expect_same_state(plain_state(*net), later, kTolerance, optimizer.name);
  }
}

TEST(WholeStepsInCheckpoints, HasStateOfOtherShapesInThose) {
  register_whole_optimizers();
  const ScratchDirectory scratch;
  run_world(3, [&](World& world) {
    FirstRankJob job(mixed_run<Adafactor>(), world, {.cuts = kAllWhole, .average = false});
    job.train(0, 1);
    save_checkpoint(scratch / "one", job.sharded, &job.optimizer);
  });
  const auto all = read_all(scratch / "one");
  EXPECT_EQ(all.at("state/row/up.weight").sizes(), at::IntArrayRef({22}));
  EXPECT_EQ(all.at("state/column/up.weight").sizes(), at::IntArrayRef({13}));
  EXPECT_EQ(all.at("state/column/experts").sizes(), (at::IntArrayRef{5, 7}));
  EXPECT_FALSE(all.contains("state/row/up.bias"));
  EXPECT_TRUE(all.contains("state/exp_avg_sq/up.bias"));
  EXPECT_FALSE(all.contains("state/row/unused"));
  const nlohmann::json optimizer = read_index(scratch / "one").at("optimizer");
  EXPECT_EQ(optimizer.at("kind"), "Adafactor");
  EXPECT_EQ(optimizer.at("counts").at("scale").at("step"), 1);
  // Another class can't take it.
  run_world(2, [&](World& world) {
    FirstRankJob job(mixed_run<Lamb>(), world, {.cuts = kAllWhole});
    expect_error([&] { load_checkpoint(scratch / "one", job.sharded, &job.optimizer); },
                 {"must fit the model", "LAMB (the checkpoint's: Adafactor)"});
  });
}

}  // namespace tessera::testing::whole_step_test
