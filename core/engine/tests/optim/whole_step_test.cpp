// Optimizers that need whole parameters give the bits of one process, however a plan places them.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/engine/muon.h>

#include "support/norm_mlp.h"
#include "support/sharded_job.h"
#include "support/whole_optimizers.h"

namespace tessera::testing::whole_step_test {

// One process that keeps float values, uses them rounded to `dtype`, and adds up the gradients of
// each replica's ranks, then those of replicas, in float. `starts_rounded`: its values, too.
State train_by_sums(const TrainingRun& run, int ranks, int replicas = 1,
                    torch::Dtype dtype = torch::kFloat, bool starts_rounded = false) {
  const auto values = run.make_net(), used = run.make_net();
  if (starts_rounded) values->to(dtype), values->to(torch::kFloat);
  used->to(dtype);
  const auto optimizer = run.make_optimizer(*values);
  const auto params = distinct_parameters(*values), own = distinct_parameters(*used);
  const auto round = [&] {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) own[i].copy_(params[i]);
  };
  round();
  const auto add = [](torch::Tensor& sum, const torch::Tensor& term) {
    if (term.defined()) sum = sum.defined() ? sum + term : term;
  };
  for (int step = 0; step < run.steps; ++step) {
    const Batch batch = global_batch(step, run.rows, run.in, run.out);
    std::vector<torch::Tensor> totals(params.size());
    for (int replica = 0; replica < replicas; ++replica) {
      std::vector<torch::Tensor> sums(params.size());
      const int each = ranks / replicas;
      for (int rank = replica * each; rank < (replica + 1) * each; ++rank) {
        used->zero_grad();
        rank_loss(*used, batch, rank, ranks, step).backward();
        for (size_t i = 0; i < own.size(); ++i)
          if (own[i].grad().defined()) add(sums[i], own[i].grad().to(torch::kFloat));
      }
      for (size_t i = 0; i < own.size(); ++i) add(totals[i], sums[i]);
    }
    for (size_t i = 0; i < own.size(); ++i) params[i].mutable_grad() = totals[i];
    optimizer->step();
    round();
  }
  return plain_state(*used);
}

// The sum of gradients is in the order of ranks; its division by 3 would not be.
ShardPlan summing(ShardPlan plan) {
  plan.average = false;
  return plan;
}

class WholeSteps : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(Over, WholeSteps, ::testing::ValuesIn(kTransports), transport_of_test);

TEST_P(WholeSteps, GiveTheBitsOfOneProcess) {
  for (const auto& [name, run, cuts] : whole_optimizers()) {
    for (const int ranks : {1, 2, 3, 4}) {
      std::vector<ParityCase> cases;
      const auto add = [&, &name = name](ShardPlan plan) {
        plan.average = false;
        cases.push_back({.plan = plan, .what = name, .tolerance = 0});
      };
      for (const ShardLevel level : kAllLevels) {
        for (const int64_t unit_bytes : {900, 1 << 20})
          add({.level = level, .unit_bytes = unit_bytes, .cuts = cuts});
        add({.level = level, .partition = Partition::kWholeParam, .unit_bytes = 900});
        // The host's kernels are not those of a device.
        if (tests_on_host())
          add({.level = level, .unit_bytes = 900, .cuts = cuts, .offload = Offload::kHost});
      }
      // Every rank but one owns nothing.
      ShardPlan lonely{.cuts = kAllWhole};
      for (const auto& item : run.make_net()->named_parameters())
        lonely.owners[item.key()] = ranks - 1;
      add(lonely);
      expect_each_has(train_by_sums(run, ranks), run, ranks, cases, GetParam());
    }
  }
}

TEST_P(WholeSteps, OfMastersGiveTheBitsOfOneProcessThatHasThem) {
  for (const auto& [name, run, cuts] : whole_optimizers()) {
    for (const int ranks : {1, 2, 3}) {
      if (ranks > 1 && !tests_on_host()) continue;  // devices round sums in between
      for (const bool is_narrow : {false, true}) {  // the model, or its use alone
        Precision precision;
        (is_narrow ? precision.master_dtype : precision.param_dtype) =
            is_narrow ? torch::kFloat : torch::kBFloat16;
        std::vector<ParityCase> cases;
        for (const ShardPlan& plan :
             at_each_level({.unit_bytes = 900, .cuts = cuts, .precision = precision}))
          cases.push_back({.plan = summing(plan), .what = name, .tolerance = 0});
        expect_each_has(train_by_sums(run, ranks, 1, torch::kBFloat16, is_narrow),
                        is_narrow ? in_dtype(run, torch::kBFloat16) : run, ranks, cases,
                        GetParam());
      }
    }
  }
}

TEST_P(WholeSteps, OfReplicasGiveTheBitsOfOneProcess) {
  for (const auto& [name, run, cuts] : whole_optimizers()) {
    const State expected = train_by_sums(run, 4, 2);
    for (const ShardPlan& at_level : at_each_level({.unit_bytes = 900, .cuts = cuts})) {
      const auto states = results_of(
          4,
          [&, &run = run](World& world) {
            const auto process_groups = world.hybrid_process_groups(2);
            ShardPlan plan = summing(at_level);
            plan.process_group = process_groups.shard;
            plan.replicate_group = process_groups.replicate;
            return train_sharded(run, world, plan);
          },
          GetParam());
      expect_same_states(states, expected, 0, name + describe(4, at_level));
    }
  }
}

TEST(WholeStepsOfParts, AreOthers) {
  for (const auto& [name, run, cuts] : whole_optimizers()) {
    if (name.starts_with("Muon")) continue;
    const State expected = train_by_sums(run, 2);
    const State parts = results_of(2, [&, &run = run](World& world) {
      return train_sharded(run, world, summing({}), {.fused = false, .elementwise = true});
    })[0];
    int differing = 0;
    for_each_pair(parts, expected, name, [&](const NamedTensor& want, const torch::Tensor& got) {
      if (!torch::equal(got.cpu(), want.tensor)) ++differing;
    });
    EXPECT_GT(differing, 3) << name;
  }
}

// Each rank of a mesh of 2 x 2 has a part of a DistTensor only: no owner could step it whole.
template <class MakeOptimizer>
State train_dist(World&, const ShardPlan& plan, const MakeOptimizer& make) {
  const auto mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
  NormMlp mlp = make_norm_mlp();
  shard_columns_then_rows(mlp, mesh, {Replicate{}});
  auto model = fully_shard(mlp, plan);
  const auto inner = make(mlp);
  ShardedOptimizer optimizer(model, *inner);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model(distribute(global_batch(step, 4, 6, 6).x, mesh, {Shard{0}, Replicate{}}))
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
  return model.full_state();
}

TEST(WholeStepsOfDistTensors, AreRefusedAndThoseOfAdamWTaken) {
  const ShardPlan whole{.unit_bytes = 200, .cuts = kAllWhole, .mesh_dim = 0};
  run_world(4, [&](World& world) {
    const auto lamb = [](NormMlp& mlp) { return std::make_unique<Lamb>(mlp->parameters()); };
    const auto muon = [](NormMlp& mlp) { return std::make_unique<Muon>(muon_groups(*mlp, {})); };
    for (const Partition partition : kPartitions) {
      ShardPlan plan = whole;
      plan.partition = partition;
      if (partition == Partition::kWholeParam) plan.cuts.clear();
      expect_error([&] { train_dist(world, plan, lamb); },
                   {"must be elementwise", "'norm.weight' is a DistTensor", "Lamb"});
      expect_error([&] { train_dist(world, plan, muon); },
                   {"must be elementwise", "'up.weight' is a DistTensor", "Muon"});
    }
    const State wanted = train_dist(world, whole, [](NormMlp& mlp) {
      return std::make_unique<CPUAdam>(mlp->parameters(), CPUAdamOptions(1e-2).weight_decay(0.01));
    });
    for (const ShardPlan& plan : at_each_level(whole)) {
      const State state = train_dist(world, plan, [](NormMlp& mlp) {
        return std::make_unique<Muon>(
            muon_groups(*mlp, {"*"}, {}, MuonOptions(1e-2).weight_decay(0.01)));
      });
      expect_same_state(state, wanted, 0, describe(4, plan));
    }
  });
}

}  // namespace tessera::testing::whole_step_test
