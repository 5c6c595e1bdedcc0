// CPUAdam in checkpoints: its options, and float state of narrow parameters, at any number of
// ranks.
#include "checkpoint/tests/saved_job.h"
#include "support/sharded_job.h"

namespace tessera::testing::cpu_adam_test {

// The same rows on every rank, so that worlds of all sizes compute the same.
struct AdamJob : ShardedJob<Mlp> {
  AdamJob(World& world, uint64_t seed, const ShardPlan& plan, at::ScalarType dtype,
          double lr = 0.01)
      : ShardedJob(run_of(seed, dtype, lr), world, plan, {}) {
    sees_all_rows = true;
  }
  static TrainingRun run_of(uint64_t seed, at::ScalarType dtype, double lr) {
    TrainingRun run =
        run_by<Mlp, CPUAdam>(CPUAdamOptions(lr).weight_decay(0.02).betas({0.8, 0.99}));
    run.make_net = [seed] { return seeded(seed, [] { return std::make_shared<Mlp>(13, 2, 5); }); };
    run.rows = 6, run.in = 13;
    return in_dtype(run, dtype);
  }
};

TEST(CPUAdamCheckpoint, GoesOnAtAnyNumberOfRanks) {
  const ScratchDirectory scratch;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<NamedTensor> state, later;
    run_world(2, [&](World& world) {
      AdamJob job(world, 1, {.unit_bytes = 500}, dtype);
      job.train(0, 2);
      job.inner->param_groups()[0].options().set_lr(0.005);
      save_checkpoint(scratch / "first", job.sharded, &job.optimizer);
      const auto saved = job.state();
      job.train(2, 4);
      const auto end = job.state();
      if (world.rank() == 0) state = saved, later = end;
    });
    for (const int ranks : {1, 2, 4}) {
      for (const ShardPlan& plan : plans()) {
        run_world(ranks, [&](World& world) {
          AdamJob job(world, 2, plan, dtype, 0.5);
          job.train(7, 8);
          load_checkpoint(scratch / "first", job.sharded, &job.optimizer);
          const auto& options =
              static_cast<CPUAdamOptions&>(job.inner->param_groups()[0].options());
          EXPECT_EQ(options.lr(), 0.005);
          EXPECT_EQ(options.betas(), std::make_tuple(0.8, 0.99));
          EXPECT_TRUE(options.adamw_mode() && options.bias_correction());
          for (const auto& item : job.inner->state()) {
            EXPECT_EQ(static_cast<CPUAdamParamState&>(*item.second).exp_avg().scalar_type(),
                      at::kFloat);
          }
          expect_same_state(job.state(), state, 0, describe(ranks, plan));
          save_checkpoint(scratch / "again", job.sharded, &job.optimizer);
          job.train(2, 4);
          expect_same_state(job.state(), later, 0, describe(ranks, plan));
        });
        expect_same_tensors(read_all(scratch / "again"), read_all(scratch / "first"),
                            describe(ranks, plan));
      }
    }
  }
}

TEST(CPUAdamCheckpoint, LoadsIntoOneProcessWithoutShards) {
  const ScratchDirectory scratch;
  std::vector<NamedTensor> later;
  run_world(2, [&](World& world) {
    AdamJob job(world, 1, {.unit_bytes = 500}, at::kBFloat16);
    job.train(0, 2);
    save_checkpoint(scratch / "first", job.sharded, &job.optimizer);
    job.train(2, 3);
    const auto end = job.state();
    if (world.rank() == 0) later = end;
  });
  const auto net = seeded(2, [] { return std::make_shared<Mlp>(13, 2, 5); });
  net->to(at::kBFloat16);
  CPUAdam adam(net->parameters(), CPUAdamOptions(0.1));
  load_checkpoint(scratch / "first", *net, &adam);
  const Batch batch = global_batch(2, 6, 13, 5);
  torch::mse_loss(net->forward(batch.x.to(at::kBFloat16)).to(at::kFloat), batch.y).backward();
  adam.step();
  expect_same_state(plain_state(*net), later, 0, "plain");
}

}  // namespace tessera::testing::cpu_adam_test
