// CPUAdam's state in bfloat16 and in 8 bits on shards: the bits of one process.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/optim/param_state.h"
#include "engine/optim/small_state.h"
#include "support/models.h"
#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::small_state_sharded_test {

using torch::Tensor;

constexpr int64_t kWidth = 37, kOut = 5;
constexpr at::ScalarType kSmall[] = {at::kBFloat16, at::kByte};

CPUAdamOptions options_of(at::ScalarType state) {
  return CPUAdamOptions(1e-2).weight_decay(0.1).state_dtype(state).seed(3);
}

TrainingRun run_with(at::ScalarType state, at::ScalarType dtype = at::kFloat) {
  TrainingRun run = in_dtype(sgd_run<Mlp>(kWidth, 3, kOut), dtype);
  run.make_optimizer = [state](Net& net) {
    return std::make_unique<CPUAdam>(net.parameters(), options_of(state));
  };
  return run;
}

// All ranks see the same rows, so that worlds of all sizes compute the same.
struct SmallJob : ShardedJob<Mlp> {
  SmallJob(const TrainingRun& run, World& world, const ShardPlan& plan)
      : ShardedJob(run, world, plan) {
    sees_all_rows = true;
  }
};

std::vector<ShardPlan> plans_for(at::ScalarType state, const std::string& directory) {
  std::vector<ShardPlan> plans;
  for (ShardPlan plan : with_each_partition({.unit_bytes = 6000})) {
    if (plan.partition != Partition::kWholeParam && state == at::kByte) plan.cuts = cpu_adam_cuts();
    for (const auto offload : {Offload::kNone, Offload::kHost, Offload::kDirectory}) {
      if (offload != Offload::kNone && plan.level != ShardLevel::kParameters) continue;
      plan.offload = offload;
      plan.offload_directory = offload == Offload::kDirectory ? directory : "";
      plans.push_back(plan);
    }
  }
  return plans;
}

void expect_same_dict(const OptimizerStateDict& dict, const OptimizerStateDict& expected,
                      const std::string& what) {
  ASSERT_EQ(dict.state.size(), expected.state.size()) << what;
  for (const auto& [number, values] : expected.state) {
    for (const auto& [name, value] : values) {
      const c10::IValue& own = dict.state.at(number).at(name);
      if (!value.isTensor()) {
        EXPECT_EQ(own.toInt(), value.toInt()) << what;
      } else if (value.toTensor().defined()) {
        EXPECT_EQ(own.toTensor().scalar_type(), value.toTensor().scalar_type()) << what << name;
        EXPECT_TRUE(torch::equal(own.toTensor(), value.toTensor())) << what << name;
      }
    }
  }
}

TEST(ShardedSmallState, HasTheBitsOfOneProcessAtEveryLevelAndPlace) {
  if (!tests_on_host()) GTEST_SKIP() << "small state is stepped by the host";
  const ScratchDirectory directory;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const at::ScalarType state : kSmall) {
      // Narrow parameters have masters.
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        run_world(ranks, [&](World& world) {
          const TrainingRun run = run_with(state, dtype);
          const Precision precision{.master_dtype = at::kFloat};
          SmallJob alone(run, world, {.level = ShardLevel::kNone, .precision = precision});
          alone.train(0, 3);
          const auto expected = full_state_dict(alone.optimizer, -1);
          for (ShardPlan plan : plans_for(state, directory.path_for(Offload::kDirectory))) {
            plan.precision = precision;
            SmallJob job(run, world, plan);
            job.train(0, 3);
            const std::string what = describe(ranks, plan);
            expect_same_state(job.state(), alone.state(), 0, what);
            expect_same_dict(full_state_dict(job.optimizer, -1), expected, what);
          }
        });
      }
    }
  }
}

TEST(ShardedSmallState, OfAWorldOfOneToFourIsThatOfLibTorchsLoop) {
  if (!tests_on_host()) GTEST_SKIP();
  for (const at::ScalarType state : kSmall) {
    const TrainingRun run = run_with(state);
    const auto net = std::static_pointer_cast<Mlp>(run.make_net());
    const auto adam = run.make_optimizer(*net);
    for (int step = 0; step < 3; ++step) {
      adam->zero_grad();
      rank_loss(*net, global_batch(step, run.rows, run.in, run.out), 0, 1, step).backward();
      adam->step();
    }
    for (const int ranks : {1, 2, 4}) {  // means of three equal numbers may differ from them
      run_world(ranks, [&](World& world) {
        SmallJob job(run, world, {.unit_bytes = 6000, .cuts = cpu_adam_cuts()});
        job.train(0, 3);
        expect_same_state(job.state(), plain_state(*net), 0, fmt::format("{} ranks", ranks));
        expect_same_dict(full_state_dict(job.optimizer, -1), state_dict_of(*adam), "state");
      });
    }
  }
}

TEST(ShardedSmallState, CountsItsBytes) {
  if (!tests_on_host()) GTEST_SKIP();
  for (const at::ScalarType state : kSmall) {
    for (const int ranks : {1, 2, 3}) {
      run_world(ranks, [&](World& world) {
        SmallJob job(run_with(state), world, {.unit_bytes = 6000, .cuts = cpu_adam_cuts()});
        job.train(0, 1);
        int64_t wanted = 0;
        for (const auto& item : job.inner->state()) {
          const auto& own = static_cast<const CPUAdamParamState&>(*item.second);
          const int64_t numel = own.exp_avg().numel();
          wanted += state == at::kBFloat16 ? 4 * numel : 2 * numel + 8 * ((numel + 255) / 256);
        }
        EXPECT_EQ(job.optimizer.memory().optimizer_state, wanted);
      });
    }
  }
}

TEST(ShardedSmallState, IsRefusedOnAllRanksWhereBlocksAreCut) {
  if (!tests_on_host()) GTEST_SKIP();
  for (const int ranks : {1, 2, 3, 4}) {
    run_world(ranks, [&](World& world) {
      const TrainingRun run = run_with(at::kByte);
      const ShardPlan plan{.unit_bytes = 6000};
      if (ranks == 1) {  // nothing is cut
        SmallJob(run, world, plan).train(0, 1);
        return;
      }
      expect_error([&] { SmallJob(run, world, plan); },
                   {"needs blocks of 256 elements together on a rank, but '",
                    "plan.cuts = tessera::cpu_adam_cuts()"});
      // Also where the option changes later, and for state that is there already.
      SmallJob job(run_with(at::kFloat), world, plan);
      job.train(0, 1);
      auto& options = static_cast<CPUAdamOptions&>(job.inner->param_groups()[0].options());
      options.state_dtype(at::kByte);
      job.backward(1);
      expect_error([&] { job.optimizer.step(); }, {"needs blocks of 256 elements together"});
      options.state_dtype(at::kBFloat16);
      job.optimizer.step();
      const auto net = run.make_net();
      const auto adam = run.make_optimizer(*net);
      rank_loss(*net, global_batch(0, run.rows, run.in, run.out), 0, 1, 0).backward();
      adam->step();
      static_cast<CPUAdamOptions&>(adam->param_groups()[0].options()).state_dtype(at::kFloat);
      const auto sharded = fully_shard(std::static_pointer_cast<Mlp>(net), plan);
      expect_error([&] { ShardedOptimizer(sharded, *adam); },
                   {"needs blocks of 256 elements together"});
    });
  }
}

TEST(ShardedSmallState, IsRefusedForDoubleMastersAndDistTensors) {
  if (!tests_on_host()) GTEST_SKIP();
  run_world(2, [&](World& world) {
    for (const at::ScalarType state : kSmall)
      expect_error([&] { SmallJob(run_with(state, at::kDouble), world, {}); },
                   {"[CPUAdam] state_dtype", "is not for '", "it is Double"});
    const auto mesh = DeviceMesh::over_world();
    Tensor param = distribute(torch::ones({6, 4}), mesh, {Shard{0}});
    CPUAdam bytes({param}, options_of(at::kByte)), halves({param}, options_of(at::kBFloat16));
    param.mutable_grad() = distribute(torch::ones({6, 4}), mesh, {Replicate{}});
    expect_error([&] { bytes.step(); }, {"it is a DistTensor"});
    halves.step();
    Tensor alone = torch::ones({6, 4});
    CPUAdam plain({alone}, options_of(at::kBFloat16));
    alone.mutable_grad() = torch::ones({6, 4});
    plain.step();
    EXPECT_TRUE(torch::equal(full_tensor(param), alone));
    EXPECT_TRUE(torch::equal(full_tensor(read_param_state(halves, param).tensors.at("exp_avg_sq")),
                             read_param_state(plain, alone).tensors.at("exp_avg_sq")));
  });
}

// Saved by one world, in each kind; trained on by others, and by LibTorch's loop.
TEST(ShardedSmallState, WholeStateLetsAnotherWorldTrainOn) {
  if (!tests_on_host()) GTEST_SKIP();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const at::ScalarType state : kSmall) {
      const TrainingRun run = run_with(state, dtype);
      OptimizerStateDict dict, end_dict;
      std::vector<NamedTensor> start, end;
      run_world(2, [&](World& world) {
        SmallJob job(run, world,
                     {.unit_bytes = 3000,
                      .cuts = cpu_adam_cuts(),
                      .precision = {.master_dtype = at::kFloat}});
        job.train(0, 2);
        const auto own = full_state_dict(job.optimizer, -1);
        const auto begun = job.state();
        job.train(2, 4);
        const auto later = full_state_dict(job.optimizer, -1);
        const auto ended = job.state();
        if (world.rank() == 0) dict = own, start = begun, end = ended, end_dict = later;
      });
      for (const int ranks : {1, 2, 3, 4}) {
        run_world(ranks, [&](World& world) {
          for (ShardPlan plan : plans_for(state, "")) {
            if (plan.offload == Offload::kDirectory) continue;
            plan.precision = {.master_dtype = at::kFloat};
            const std::string what = describe(ranks, plan);
            SmallJob job(run, world, plan);
            job.train(7, 8);
            load_full_state_dict(job.optimizer, dict);
            job.sharded.load_full_state(start);
            expect_same_dict(full_state_dict(job.optimizer, -1), dict, what);
            if (ranks == 3) continue;
            job.train(2, 4);
            expect_same_state(job.state(), end, 0, what);
            expect_same_dict(full_state_dict(job.optimizer, -1), end_dict, what);
          }
        });
      }
    }
  }
}

Tensor in_float(const OptimizerStateDict::Values& values, const std::string& name) {
  const Tensor moment = values.at(name).toTensor();
  const auto scale = values.find(name + "_scale");
  const Tensor scales = scale == values.end() ? Tensor() : scale->second.toTensor();
  return converted({moment, scales}, name == "exp_avg", at::kFloat, moment).values;
}

// Between kinds of state, whose blocks are decoded where ranks cut them.
TEST(ShardedSmallState, IsConvertedByALoadOfWholeState) {
  if (!tests_on_host()) GTEST_SKIP();
  for (const at::ScalarType from : {at::kFloat, at::kBFloat16, at::kByte}) {
    for (const at::ScalarType to : {at::kFloat, at::kBFloat16, at::kByte}) {
      run_world(3, [&](World& world) {
        SmallJob saved(run_with(from), world, {.unit_bytes = 3000, .cuts = cpu_adam_cuts()});
        saved.train(0, 2);
        const auto dict = full_state_dict(saved.optimizer, -1);
        SmallJob whole(run_with(to), world, {.level = ShardLevel::kNone});
        ShardPlan plan{.unit_bytes = 3000};
        if (to == at::kByte) plan.cuts = cpu_adam_cuts();
        SmallJob cut(run_with(to), world, plan);
        for (SmallJob* job : {&whole, &cut}) {
          load_full_state_dict(job->optimizer, dict);
          job->sharded.load_full_state(saved.state());
          job->train(2, 3);
          for (const auto& item : job->inner->state())
            EXPECT_EQ(static_cast<CPUAdamParamState&>(*item.second).exp_avg().scalar_type(), to);
        }
        saved.train(2, 3);
        const auto wanted = full_state_dict(saved.optimizer, -1);
        const auto got = full_state_dict(cut.optimizer, -1);
        for (const auto& [number, values] : wanted.state) {
          for (const char* const name : {"exp_avg", "exp_avg_sq"}) {
            const Tensor own = in_float(got.state.at(number), name);
            const Tensor other = in_float(values, name);
            // Rounded once or twice, by at most 0.71 % of the largest in its block.
            EXPECT_LE((own - other).abs().max().item<float>(),
                      0.03 * other.abs().max().item<float>())
                << number << name << from << to;
          }
        }
        expect_same_state(cut.state(), whole.state(), 0, "cut");
        expect_same_dict(full_state_dict(cut.optimizer, -1), full_state_dict(whole.optimizer, -1),
                         "cut");
      });
    }
  }
}

TEST(ShardedSmallState, ComesBackFromTheHostAndOutOfShards) {
  if (!tests_on_host()) GTEST_SKIP();
  for (const at::ScalarType state : kSmall) {
    run_world(2, [&](World& world) {
      const ShardPlan plan{.unit_bytes = 3000, .cuts = cpu_adam_cuts(), .offload = Offload::kHost};
      SmallJob expected(run_with(state), world, {.unit_bytes = 3000, .cuts = cpu_adam_cuts()});
      SmallJob job(run_with(state), world, plan), before(run_with(state), world, plan);
      // All units fit into what memory() then counts, whether state is there yet or not.
      const int64_t early = before.optimizer.keep_on_device(1 << 20);
      for (SmallJob* one : {&expected, &job, &before}) one->train(0, 2);
      EXPECT_EQ(job.optimizer.keep_on_device(1 << 20), early);
      for (SmallJob* one : {&expected, &job, &before}) one->train(2, 3);
      const auto bytes = job.optimizer.memory();
      EXPECT_EQ(bytes.optimizer_state, expected.optimizer.memory().optimizer_state);
      EXPECT_EQ(bytes.offloaded, 0);
      EXPECT_EQ(before.optimizer.memory().optimizer_state, bytes.optimizer_state);
      for (SmallJob* one : {&job, &before})
        expect_same_state(one->state(), expected.state(), 0, "kept");
      const auto dict = full_state_dict(expected.optimizer, -1);
      job.optimizer.unwrap();
      job.sharded.unwrap();
      expect_same_dict(state_dict_of(*job.inner), dict, "unwrapped");
    });
  }
}

}  // namespace tessera::testing::small_state_sharded_test
