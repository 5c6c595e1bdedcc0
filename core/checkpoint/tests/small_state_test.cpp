// CPUAdam's state in bfloat16 and in 8 bits in checkpoints: to the bit at any number of ranks.
#include "engine/optim/small_state.h"

#include <tessera/checkpoint/checkpoint_files.h>

#include "checkpoint/tests/saved_job.h"
#include "engine/optim/param_state.h"
#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::small_state_test {

using torch::Tensor;

constexpr at::ScalarType kKinds[] = {at::kFloat, at::kBFloat16, at::kByte};

TrainingRun run_of(at::ScalarType state, uint64_t seed, at::ScalarType dtype) {
  TrainingRun run =
      run_by<Mlp, CPUAdam>(CPUAdamOptions(0.01).weight_decay(0.02).state_dtype(state));
  run.make_net = [seed] { return seeded(seed, [] { return std::make_shared<Mlp>(37, 2, 5); }); };
  run.rows = 6, run.in = 37;
  return in_dtype(run, dtype);
}

// The same rows on every rank, so that worlds of all sizes compute the same.
struct SmallJob : ShardedJob<Mlp> {
  SmallJob(World& world, at::ScalarType state, uint64_t seed, ShardPlan plan,
           at::ScalarType dtype = at::kFloat)
      : ShardedJob(run_of(state, seed, dtype), world, plan, {}) {
    sees_all_rows = true;
  }
};

ShardPlan in_blocks(ShardPlan plan) {
  plan.cuts = cpu_adam_cuts();
  return plan;
}

// The first moment of each parameter in float.
std::vector<NamedTensor> moments_of(SmallJob& job) {
  const auto dict = full_state_dict(job.optimizer, -1);
  std::vector<NamedTensor> moments;
  for (const auto& [number, values] : dict.state) {
    const Tensor moment = values.at("exp_avg").toTensor();
    const auto scale = values.find("exp_avg_scale");
    const KeptMoment kept{moment, scale == values.end() ? Tensor() : scale->second.toTensor()};
    moments.push_back({std::to_string(number), converted(kept, true, at::kFloat, moment).values});
  }
  return moments;
}

TEST(SmallStateCheckpoint, GoesOnAtAnyNumberOfRanks) {
  if (!tests_on_host()) GTEST_SKIP() << "small state is stepped by the host";
  const ScratchDirectory scratch;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const at::ScalarType kind : kKinds) {
      std::vector<NamedTensor> state, later, moments;
      const Precision precision{.master_dtype = at::kFloat};
      run_world(3, [&](World& world) {
        // Each rank steps everything, and stores parts that don't begin at blocks.
        SmallJob job(world, kind, 1,
                     {.level = ShardLevel::kNone, .unit_bytes = 2000, .precision = precision},
                     dtype);
        job.train(0, 2);
        save_checkpoint(scratch / "first", job.sharded, &job.optimizer);
        const auto saved = job.state(), own = moments_of(job);
        if (world.rank() == 0) state = saved, moments = own;
      });
      // In other files, whose parts don't begin at blocks either.
      reshard_checkpoint(scratch / "first", scratch / "parts", 3);
      expect_same_tensors(read_all(scratch / "parts"), read_all(scratch / "first"), "parts");
      run_world(1, [&](World& world) {
        SmallJob job(world, kind, 2, {.precision = precision}, dtype);
        load_checkpoint(scratch / "first", job.sharded, &job.optimizer);
        job.train(2, 4);
        later = job.state();
      });
      for (const int ranks : {1, 2, 3, 4}) {
        for (ShardPlan plan : plans()) {
          if (kind == at::kByte && plan.partition != Partition::kWholeParam) plan = in_blocks(plan);
          plan.precision = precision;
          if (ranks % 2 == 0) plan.offload = Offload::kHost;
          if (plan.level == ShardLevel::kNone) plan.offload = Offload::kNone;
          const std::string what = describe(ranks, plan);
          run_world(ranks, [&](World& world) {
            SmallJob job(world, kind, 2, plan, dtype);
            job.train(7, 8);
            load_checkpoint(scratch / (ranks == 2 ? "parts" : "first"), job.sharded,
                            &job.optimizer);
            expect_same_state(job.state(), state, 0, what);
            expect_same_state(moments_of(job), moments, 0, what);
            save_checkpoint(scratch / "again", job.sharded, &job.optimizer);
            if (ranks == 3) return;  // means of three equal numbers may differ from them
            job.train(2, 4);
            expect_same_state(job.state(), later, 0, what);
          });
          expect_same_tensors(read_all(scratch / "again"), read_all(scratch / "first"), what);
        }
      }
    }
  }
}

TEST(SmallStateCheckpoint, LoadsIntoOneProcessWithoutShards) {
  if (!tests_on_host()) GTEST_SKIP();
  const ScratchDirectory scratch;
  for (const at::ScalarType kind : kKinds) {
    std::vector<NamedTensor> later;
    run_world(2, [&](World& world) {
      SmallJob job(world, kind, 1, in_blocks({.unit_bytes = 2000}));
      job.train(0, 2);
      save_checkpoint(scratch / "first", job.sharded, &job.optimizer);
      job.train(2, 3);
      const auto end = job.state();
      if (world.rank() == 0) later = end;
    });
    const auto net = seeded(2, [] { return std::make_shared<Mlp>(37, 2, 5); });
    CPUAdam adam(net->parameters(), CPUAdamOptions(0.1).state_dtype(kind));
    load_checkpoint(scratch / "first", *net, &adam);
    const Batch batch = global_batch(2, 6, 37, 5);
    torch::mse_loss(net->forward(batch.x), batch.y).backward();
    adam.step();
    expect_same_state(plain_state(*net), later, 0, "plain");
  }
}

TEST(SmallStateCheckpoint, OfAnotherKindIsConvertedAndTheOptimizerKeepsItsOwn) {
  if (!tests_on_host()) GTEST_SKIP();
  const ScratchDirectory scratch;
  for (const at::ScalarType from : kKinds) {
    for (const at::ScalarType to : kKinds) {
      for (const Offload offload : {Offload::kNone, Offload::kHost}) {
        run_world(2, [&](World& world) {
          SmallJob saved(world, from, 1, in_blocks({.unit_bytes = 2000, .offload = offload}));
          saved.train(0, 2);
          save_checkpoint(scratch / "first", saved.sharded, &saved.optimizer);
          SmallJob job(world, to, 2, in_blocks({.unit_bytes = 1000, .offload = offload}));
          load_checkpoint(scratch / "first", job.sharded, &job.optimizer);
          saved.train(2, 3), job.train(2, 3);
          const auto expected = moments_of(saved), moments = moments_of(job);
          for (size_t i = 0; i < moments.size(); ++i) {
            // Rounded once or twice, by at most 0.71 % of the largest in its block.
            const double bound = 0.03 * expected[i].tensor.abs().max().item<double>();
            EXPECT_LE((moments[i].tensor - expected[i].tensor).abs().max().item<double>(), bound);
          }
          for (const auto& item : job.inner->state())
            EXPECT_EQ(static_cast<CPUAdamParamState&>(*item.second).exp_avg().scalar_type(), to);
        });
      }
    }
  }
}

TEST(SmallStateCheckpoint, IsRefusedWhereItsBlocksAreCutOrInAnotherOrder) {
  if (!tests_on_host()) GTEST_SKIP();
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    SmallJob saved(world, at::kByte, 1, in_blocks({.unit_bytes = 2000}));
    saved.train(0, 1);
    save_checkpoint(scratch / "first", saved.sharded, &saved.optimizer);
    SmallJob job(world, at::kFloat, 2, {.unit_bytes = 2000});
    const auto before = job.state();
    expect_error([&] { load_checkpoint(scratch / "first", job.sharded, &job.optimizer); },
                 {"has 8-bit state in blocks of 256 elements, which ranks cut here",
                  "plan.cuts = cpu_adam_cuts()"});
    expect_same_state(job.state(), before, 0, "refused");
  });
  const auto net = seeded(2, [] { return std::make_shared<Mlp>(37, 2, 5); });
  for (auto& param : net->parameters())
    if (param.dim() == 2) param.set_data(param.t().contiguous().t());
  CPUAdam adam(net->parameters(), CPUAdamOptions(0.1).state_dtype(at::kByte));
  expect_error([&] { load_checkpoint(scratch / "first", *net, &adam); },
               {"which are of another memory order"});
}

}  // namespace tessera::testing::small_state_test
