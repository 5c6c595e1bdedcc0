// Classes of optimizers that users describe by OptimizerTraits.
#include <fmt/format.h>

#include "engine/tests/optim/saved_optimizers.h"
#include "support/scratch_directory.h"
#include "support/whole_optimizers.h"

namespace tessera::testing::described_optimizer_test {

struct DerivedSigns : Signs {
  using Signs::Signs;
};

/// Divides each row of the moment by its norm.
struct RowNorms : EachWhole<RateOptions, MomentState> {
  using EachWhole::EachWhole;
  void update(const RateOptions& options, torch::Tensor param, const torch::Tensor& grad,
              MomentState& state) const override {
    if (!state.moment.defined()) state.moment = torch::zeros_like(param);
    ++state.step;
    const torch::Tensor moment = state.moment.lerp_(grad, 0.1);
    if (param.dim() < 2) {
      param.sub_(moment, options.lr);
      return;
    }
    for (int64_t row = 0; row < param.size(0); ++row)
      param[row].sub_(moment[row] / (moment[row].norm() + 1e-8), options.lr);
  }
};

/// A class that is not described.
struct Unknown : Signs {
  using Signs::Signs;
};

template <class Optimizer>
void register_moments(const std::string& name, Cut cut) {
  register_optimizer<Optimizer, RateOptions, MomentState>(
      {.name = name, .cut = cut, .state = moment_fields, .options = rate_fields});
}

void register_all() {
  static const bool done = [] {
    register_whole_optimizers();
    register_moments<RowNorms>("RowNorms", Cut::kRows);
    return true;
  }();
  EXPECT_TRUE(done);
}

const std::vector<CutRule> kByRows{{"*", Cut::kRows, 1, 1}, {"scale", Cut::kWhole}};

std::vector<WholeOptimizer> all_described() {
  register_all();
  auto all = whole_optimizers();
  all.push_back({"Signs", mixed_run<Signs>(), {}});
  all.push_back({"RowNorms", mixed_run<RowNorms>(), kByRows});
  return all;
}

TEST(DescribedOptimizer, StepsWhatItsCutAllows) {
  register_all();
  const ScratchDirectory scratch;
  for (const auto& [run, cuts] : {std::pair(mixed_run<Signs>(), std::vector<CutRule>()),
                                  std::pair(mixed_run<RowNorms>(), kByRows)}) {
    for (const int ranks : {1, 2, 4}) {
      std::vector<ParityCase> cases;
      for (const Offload offload : {Offload::kNone, Offload::kHost, Offload::kDirectory}) {
        for (const ShardPlan& plan : at_each_level({.unit_bytes = 900,
                                     .cuts = cuts,
                                     .offload = offload,
                                     .offload_directory = scratch.path_for(offload)}))
          cases.push_back({.plan = plan, .tolerance = 0});
      }
      expect_parity_of_each(run, ranks, cases);
    }
  }
  run_world(2, [](World& world) {
    const auto expect_refused = [&](const TrainingRun& run, const ShardPlan& plan,
                                    const std::string& name) {
      expect_error([&] { ShardedJob<>(run, world, plan); },
                   {"must be elementwise", "is cut", name});
    };
    expect_refused(mixed_run<RowNorms>(), {}, "RowNorms");
    expect_refused(mixed_run<Lamb>(), {.cuts = kByRows}, "Lamb");
    expect_refused(mixed_run<DerivedSigns>(), {}, "DerivedSigns");
    ShardedJob<> derived(mixed_run<DerivedSigns>(), world, {.cuts = kAllWhole});
    derived.train(0, 1);
    EXPECT_EQ(full_state_dict(derived.optimizer, -1).state.size(), 12u);
  });
}

// State as text, with strides.
std::map<std::string, torch::Tensor> tensors_of(const OptimizerStateDict& dict) {
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& [number, values] : dict.state)
    for (const auto& [name, value] : values)
      tensors[fmt::format("{} of {}", name, number)] =
          value.isTensor() ? value.toTensor() : torch::tensor(value.toInt());
  return tensors;
}

TEST(DescribedOptimizer, HasItsFullStateAtAnyNumberOfRanksAndPlacement) {
  for (const auto& [name, run, cuts] : all_described()) {
    OptimizerStateDict dict;
    State state, later;
    const ShardPlan first{.unit_bytes = 900, .cuts = cuts, .average = false};
    run_world(2, [&, &run = run](World& world) {
      FirstRankJob job(run, world, first);
      job.train(0, 3);
      job.inner->param_groups()[0].options().set_lr(0.005);
      auto own = full_state_dict(job.optimizer);
      const State saved = job.state();
      job.train(3, 5);
      const State end = job.state();
      if (world.rank() == 0) dict = std::move(own), state = saved, later = end;
    });
    std::vector<ShardPlan> plans{first,
                                 {.level = ShardLevel::kOptimizerState,
                                  .partition = Partition::kWholeParam,
                                  .average = false},
                                 {.level = ShardLevel::kNone, .cuts = cuts, .average = false}};
    if (tests_on_host()) {
      plans.push_back(first);
      plans.back().offload = Offload::kHost;
    }
    for (const int ranks : {1, 3, 4}) {
      for (const ShardPlan& plan : plans) {
        run_world(ranks, [&, &name = name, &run = run](World& world) {
          FirstRankJob job(run, world, plan);
          job.train(7, 8);
          job.sharded.load_full_state(state);
          load_full_state_dict(job.optimizer, dict);
          EXPECT_EQ(job.inner->param_groups()[0].options().get_lr(), 0.005);
          const auto again = tensors_of(full_state_dict(job.optimizer, -1));
          for (const auto& [key, value] : tensors_of(dict)) {
            ASSERT_TRUE(again.contains(key)) << name << ": no " << key;
            EXPECT_TRUE(torch::equal(again.at(key), value)) << name << ": " << key;
          }
          job.train(3, 5);
          expect_same_state(job.state(), later, tests_on_host() ? 0 : 1e-5,
                            name + describe(ranks, plan));
          job.optimizer.unwrap();
          job.sharded.unwrap();
          EXPECT_EQ(tensors_of(state_dict_of(*job.inner)).size(), again.size());
        });
      }
    }
    // One process without shards.
    const auto net = run.make_net();
    const auto inner = run.make_optimizer(*net);
    load_state_dict(*inner, dict);
    const auto loaded = tensors_of(state_dict_of(*inner));
    for (const auto& [key, value] : tensors_of(dict))
      EXPECT_TRUE(torch::equal(loaded.at(key), value)) << name << ": " << key;
  }
}

TEST(DescribedOptimizer, ShowsItsMemoryAndComesBackFromTheHost) {
  register_all();
  run_world(2, [](World& world) {
    for (const TrainingRun& run : {mixed_run<Adafactor>(), mixed_run<Soap>()}) {
      FirstRankJob plain(run, world, {.cuts = kAllWhole, .average = false}),
          moved(
              run, world,
              {.unit_bytes = 900, .cuts = kAllWhole, .average = false, .offload = Offload::kHost});
      for (FirstRankJob* const job : {&plain, &moved}) job->train(0, 2);
      EXPECT_GT(plain.optimizer.memory().optimizer_state, 0);
      EXPECT_EQ(moved.optimizer.memory().optimizer_state, 0);
      moved.optimizer.keep_on_device(1 << 30);
      EXPECT_EQ(moved.optimizer.memory().offloaded, 0);
      for (FirstRankJob* const job : {&plain, &moved}) job->train(2, 4);
      expect_same_state(moved.state(), plain.state(), 0, "kept on the device");
    }
  });
}

TEST(DescribedOptimizer, HasOptionsOfTheirTypes) {
  register_all();
  const auto net = mixed_run<Signs>().make_net();
  Signs one(distinct_parameters(*net)), other(distinct_parameters(*net));
  auto& options = static_cast<RateOptions&>(one.param_groups()[0].options());
  options.lr = 0.25, options.every = 7, options.flag = true;
  const OptimizerStateDict dict = state_dict_of(one);
  EXPECT_TRUE(dict.param_groups[0].options.at("flag").isBool());
  load_state_dict(other, dict);
  const auto& loaded = static_cast<RateOptions&>(other.param_groups()[0].options());
  EXPECT_EQ(loaded.lr, 0.25);
  EXPECT_EQ(loaded.every, 7);
  EXPECT_TRUE(loaded.flag);
}

TEST(DescribedOptimizer, IsNeededForWhatReadsState) {
  register_all();
  struct Plain : EachWhole<RateOptions, LambState> {
    using EachWhole::EachWhole;
    void update(const RateOptions& options, torch::Tensor param, const torch::Tensor& grad,
                LambState& /*state*/) const override {
      param.sub_(grad, options.lr);
    }
  };
  run_world(2, [](World& world) {
    expect_error(
        [&] {
          ShardedJob<>(mixed_run<Plain>(), world, {.cuts = kAllWhole, .offload = Offload::kHost});
        },
        {"register_optimizer()", "Plain"});
    ShardedJob<> job(mixed_run<Plain>(), world, {.cuts = kAllWhole});
    job.train(0, 1);
    const ScratchDirectory scratch;
    expect_error([&] { save_checkpoint(scratch / "one", job.sharded, &job.optimizer); },
                 {"register_optimizer()", "Plain"});
  });
}

// Its count has another name than those of LibTorch.
struct Calls : Signs {
  using Signs::Signs;
};

TEST(DescribedOptimizer, StepsDistTensorsInShards) {
  register_all();
  static const bool done = [] {
    register_optimizer<Calls, RateOptions, MomentState>(
        {.name = "Calls",
         .cut = Cut::kAnywhere,
         .state = [](MomentState& own) -> OptimizerStateFields {
           return {.tensors = {{"moment", &own.moment}}, .counts = {{"calls", &own.step}}};
         },
         .options = rate_fields});
    return true;
  }();
  EXPECT_TRUE(done);
  const auto values = [](uint64_t seed) {
    return seeded(seed, [] { return torch::randn({7, 5}, default_generator()); });
  };
  torch::Tensor alone = values(1).requires_grad_();
  Signs plain({alone});
  for (const int step : {10, 11, 12}) {
    alone.mutable_grad() = values(step);
    plain.step();
  }
  run_world(2, [&](World&) {
    const auto mesh = DeviceMesh::over_world();
    const auto train = [&](torch::Tensor& param, DistOptimizer& optimizer, int first, int last) {
      for (int step = first; step < last; ++step) {
        optimizer.zero_grad();
        (param * distribute(values(step) / mesh.size(), mesh, {Replicate{}})).sum().backward();
        optimizer.step();
      }
    };
    const DistOptimizerOptions options{.level = ShardLevel::kOptimizerState};
    torch::Tensor param = distribute(values(1), mesh, {Replicate{}}).requires_grad_();
    Signs signs({param});
    DistOptimizer optimizer(signs, options);
    train(param, optimizer, 10, 12);
    const auto dict = optimizer.state_dict();
    EXPECT_EQ(dict.at("param 0.moment").sizes(), param.sizes());
    torch::Tensor other = full_tensor(param).detach().clone();
    other = distribute(other, mesh, {Replicate{}}).requires_grad_();
    Signs other_signs({other});
    DistOptimizer resumed(other_signs, options);
    expect_error([&] { resumed.load_state_dict(dict); }, {"'param 0.step' is unknown"});
    const torch::Tensor start = other.detach().clone();
    train(other, resumed, 20, 21);  // it makes state
    {
      torch::NoGradGuard no_grad;
      other.copy_(start);
    }
    resumed.load_state_dict(dict);
    train(other, resumed, 12, 13);
    train(param, optimizer, 12, 13);
    EXPECT_TRUE(torch::equal(full_tensor(other), full_tensor(param)));
    torch::Tensor counted = distribute(values(1), mesh, {Replicate{}}).requires_grad_();
    Calls calls({counted});
    DistOptimizer refused(calls, options);
    expect_error([&] { refused.state_dict(); }, {"the count 'step' alone", "Calls", "'calls'"});
  });
}

TEST(DescribedOptimizer, MustBeDescribedOnceAndWhole) {
  register_all();
  struct Other : Signs {};
  const auto with = [](const std::string& name, Cut cut, bool others = false) {
    register_optimizer<Other, RateOptions, MomentState>(
        {.name = name,
         .cut = cut,
         .state = [=](MomentState& own) -> OptimizerStateFields {
           if (!others) return moment_fields(own);
           return {.others = {{"moment", &own.moment}}};
         },
         .options = rate_fields});
  };
  expect_error([&] { with("", Cut::kWhole); }, {"must have a name", "lack the name"});
  expect_error([&] { with("Other", Cut::kElements); }, {"'Other'", "kElements"});
  expect_error([&] { with("Other", Cut::kRows, true); }, {"state of other shapes", "'Other'"});
  for (const char* name : {"AdamW", "Muon", "Signs"})
    expect_error([&] { with(name, Cut::kWhole); }, {"registered once", name});
  expect_error([&] { register_moments<Signs>("Again", Cut::kWhole); }, {"registered once"});
  expect_error(
      [&] {
        register_optimizer<torch::optim::AdamW, torch::optim::AdamWOptions,
                           torch::optim::AdamWParamState>(
            {.name = "Mine",
             .state = [](auto&) { return OptimizerStateFields(); },
             .options = [](auto&) { return OptimizerOptionFields(); }});
      },
      {"registered once", "'Mine'"});
  expect_error(
      [&] {
        register_optimizer<Other, RateOptions, MomentState>(
            {.name = "Other", .state = moment_fields});
      },
      {"'Other' lack options"});
  // Objects must be what the traits say.
  struct Wrong : Signs {
    using Signs::Signs;
  };
  register_optimizer<Wrong, RateOptions, LambState>(
      {.name = "Wrong",
       .state = [](LambState& own) -> OptimizerStateFields {
         return {.counts = {{"step", &own.step}}};
       },
       .options = rate_fields});
  const auto net = mixed_run<Wrong>().make_net();
  Wrong wrong(distinct_parameters(*net));
  for (auto& param : wrong.param_groups()[0].params())
    param.mutable_grad() = torch::ones_like(param);
  wrong.step();
  expect_error([&] { state_dict_of(wrong); },
               {"[OptimizerTraits] objects of 'Wrong'", "LambState", "MomentState"});
}

}  // namespace tessera::testing::described_optimizer_test
