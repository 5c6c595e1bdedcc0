// The state of optimizers, whole and in the layout of an optimizer that is not sharded.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sstream>

#include "access/sharded_state.h"
#include "optim/state_shape.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace {

using namespace testing;
using namespace torch::optim;

constexpr int64_t kWidth = 9, kOut = 5;

std::shared_ptr<Mlp> make_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(kWidth, 2, kOut); });
}

// --- a user's own optimizer
// ------------------------------------------------------------------------

struct HeavyBallOptions : OptimizerCloneableOptions<HeavyBallOptions> {
  HeavyBallOptions(double lr) : lr_(lr) {}
  TORCH_ARG(double, lr);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  }
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

struct HeavyBallState : OptimizerCloneableParamState<HeavyBallState> {
  TORCH_ARG(torch::Tensor, speed);
  TORCH_ARG(torch::Tensor, total);  // one element: of all steps
  TORCH_ARG(int64_t, count) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, speed);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, total);
    torch::serialize::InputArchive inner;
    archive.read("counts", inner);
    c10::IValue value;
    inner.read("count", value);
    count(value.toInt());
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(speed);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(total);
    torch::serialize::OutputArchive inner(archive.compilation_unit());
    inner.write("count", c10::IValue(count()));
    archive.write("counts", inner);
  }
};

// What it has for a parameter: a tensor of its shape, a tensor of one element, an archive.
class HeavyBall : public Optimizer {
 public:
  HeavyBall(std::vector<torch::Tensor> params, HeavyBallOptions options)
      : Optimizer(std::move(params), std::make_unique<HeavyBallOptions>(options)) {}

  torch::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    ++calls;
    for (auto& group : param_groups_) {
      for (auto& param : group.params()) {
        if (!param.grad().defined()) continue;
        auto& slot = state_[param.unsafeGetTensorImpl()];
        if (!slot) {
          slot = std::make_unique<HeavyBallState>();
          auto& fresh = static_cast<HeavyBallState&>(*slot);
          fresh.speed(torch::zeros_like(param, torch::MemoryFormat::Preserve));
          fresh.total(torch::zeros({1}));
        }
        auto& state = static_cast<HeavyBallState&>(*slot);
        state.count(state.count() + 1);
        state.total().add_(1);
        state.speed().mul_(0.9).add_(param.grad());
        param.sub_(state.speed(), group.options().get_lr() / std::sqrt(state.count()));
      }
    }
    return {};
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<HeavyBallState, HeavyBallOptions>(archive, *this);
    archive.write("calls", c10::IValue(calls));
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<HeavyBallState, HeavyBallOptions>(archive, *this);
    c10::IValue value;
    archive.read("calls", value);
    calls = value.toInt();
  }
  int64_t calls = 0;
};

// --- runs
// ------------------------------------------------------------------------------------------

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(Net&)>;

struct NamedOptimizer {
  std::string name;
  MakeOptimizer make;
};

template <class O, class Options>
NamedOptimizer named(std::string name, Options options) {
  return {std::move(name), [=](Net& net) -> std::unique_ptr<Optimizer> {
            return std::make_unique<O>(net.parameters(), options);
          }};
}

// Weights and biases in groups of their own, of which the parameters are interleaved.
std::unique_ptr<Optimizer> make_groups(Net& net) {
  std::vector<torch::Tensor> weights, rest;
  for (const auto& param : net.parameters()) (param.dim() > 1 ? weights : rest).push_back(param);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(rest, std::make_unique<AdamWOptions>(AdamWOptions(3e-2).weight_decay(0)));
  groups.emplace_back(weights, std::make_unique<AdamWOptions>(AdamWOptions(1e-2).amsgrad(true)));
  return std::make_unique<AdamW>(groups, AdamWOptions(1e-3));
}

std::vector<NamedOptimizer> all_optimizers() {
  return {
      named<AdamW>("AdamW", AdamWOptions(1e-2).amsgrad(true)),
      named<Adam>("Adam", AdamOptions(1e-2).weight_decay(0.1)),
      named<SGD>("SGD with momentum", SGDOptions(0.1).momentum(0.9)),
      named<SGD>("SGD", SGDOptions(0.1)),
      named<Adagrad>("Adagrad", AdagradOptions(1e-2).initial_accumulator_value(0.3)),
      named<RMSprop>("RMSprop", RMSpropOptions(1e-3).momentum(0.5).centered(true)),
      named<HeavyBall>("HeavyBall", HeavyBallOptions(0.1)),
      {"AdamW with two param groups", make_groups},
  };
}

// Steps `first` to `last` - 1 with the sums of `ranks` ranks.
void train(Net& net, Optimizer& optimizer, int ranks, int first, int last) {
  for (int step = first; step < last; ++step) {
    const Batch batch = global_batch(step, 12, kWidth, kOut);
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank)
      (rank_loss(net, batch, rank, ranks, step) / ranks).backward();
    optimizer.step();
  }
}

struct Plain {
  explicit Plain(const MakeOptimizer& make) : net(make_mlp()), optimizer(make(*net)) {}
  std::shared_ptr<Mlp> net;
  std::unique_ptr<Optimizer> optimizer;
};

struct Job {
  Job(const MakeOptimizer& make, const ShardPlan& plan)
      : net(make_mlp()),
        inner(make(*net)),
        sharded(fully_shard(net, plan)),
        optimizer(sharded, *inner, {.fused = false}) {}

  void train(int first, int last) {
    ProcessGroup& ranks = sharded.state()->process_group();
    for (int step = first; step < last; ++step) {
      optimizer.zero_grad();
      rank_loss(*net, global_batch(step, 12, kWidth, kOut), ranks.rank(), ranks.size(), step)
          .backward();
      optimizer.step();
    }
  }

  std::shared_ptr<Mlp> net;
  std::unique_ptr<Optimizer> inner;
  Sharded<Mlp> sharded;
  ShardedOptimizer optimizer;
};

std::vector<ShardPlan> all_plans() {
  std::vector<ShardPlan> plans;
  for (const ShardLevel level : kAllLevels) {
    for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam})
      plans.push_back({.level = level, .partition = partition, .unit_bytes = 600});
  }
  return plans;
}

// All for the user's own optimizer and for param groups, two for the others.
std::vector<ShardPlan> plans_for(const std::string& optimizer) {
  if (optimizer == "HeavyBall" || optimizer == "AdamW with two param groups") return all_plans();
  return {
      {.partition = Partition::kFlatEven, .unit_bytes = 600},
      {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam, .unit_bytes = 600}};
}

std::string describe(int ranks, const ShardPlan& plan) {
  return fmt::format("{} ranks, level {}, partition {}", ranks, int(plan.level),
                     int(plan.partition));
}

// --- comparisons
// -----------------------------------------------------------------------------------

using Values = OptimizerStateDict::Values;

void expect_same_values(const Values& actual, const Values& expected, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, want] : expected) {
    ASSERT_TRUE(actual.contains(name)) << what << ": no " << name;
    const c10::IValue& got = actual.at(name);
    ASSERT_EQ(got.isTensor(), want.isTensor()) << what << ": " << name;
    if (!want.isTensor()) {
      EXPECT_EQ(fmt::format("{}", c10::str(got)), fmt::format("{}", c10::str(want)))
          << what << ": " << name;
      continue;
    }
    const torch::Tensor a = got.toTensor(), b = want.toTensor();
    ASSERT_EQ(a.sizes(), b.sizes()) << what << ": " << name;
    EXPECT_EQ(a.strides(), b.strides()) << what << ": " << name;
    EXPECT_TRUE(tolerance == 0 ? torch::equal(a, b) : torch::allclose(a, b, tolerance, tolerance))
        << what << ": " << name << " differs by " << (a - b).abs().max().item<double>();
  }
}

void expect_same_dict(const OptimizerStateDict& actual, const OptimizerStateDict& expected,
                      double tolerance, const std::string& what) {
  ASSERT_EQ(actual.param_groups.size(), expected.param_groups.size()) << what;
  for (size_t i = 0; i < expected.param_groups.size(); ++i) {
    EXPECT_EQ(actual.param_groups[i].params, expected.param_groups[i].params) << what;
    expect_same_values(actual.param_groups[i].options, expected.param_groups[i].options, 0,
                       fmt::format("{}, group {}", what, i));
  }
  ASSERT_EQ(actual.state.size(), expected.state.size()) << what;
  for (const auto& [number, values] : expected.state) {
    ASSERT_TRUE(actual.state.contains(number)) << what << ": no " << number;
    expect_same_values(actual.state.at(number), values, tolerance,
                       fmt::format("{}, parameter {}", what, number));
  }
  expect_same_values(actual.extra, expected.extra, 0, what + ", extra");
}

OptimizerStateDict copy_of(const OptimizerStateDict& dict) {
  OptimizerStateDict copy = dict;
  for (auto& [number, values] : copy.state) {
    for (auto& [name, value] : values)
      if (value.isTensor()) value = value.toTensor().clone(torch::MemoryFormat::Preserve);
  }
  return copy;
}

double close_to(int ranks) { return ranks == 3 ? 1e-4 : 1e-6; }

// --- plain optimizers
// ------------------------------------------------------------------------------

TEST(OptimizerStateDict, OfOneOptimizerLetsAnotherTrainOnToTheSameBits) {
  for (const auto& [name, make] : all_optimizers()) {
    Plain first(make), second(make);
    train(*first.net, *first.optimizer, 1, 0, 3);
    const OptimizerStateDict dict = state_dict_of(*first.optimizer);
    {
      torch::NoGradGuard no_grad;
      const auto from = first.net->parameters(), to = second.net->parameters();
      for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
    }
    auto* const options = &second.optimizer->param_groups()[0].options();
    const OptimizerStateDict before = copy_of(dict);
    load_state_dict(*second.optimizer, dict);
    EXPECT_EQ(&second.optimizer->param_groups()[0].options(), options) << name;
    expect_same_dict(state_dict_of(*second.optimizer), dict, 0, name);
    train(*first.net, *first.optimizer, 1, 3, 6);
    train(*second.net, *second.optimizer, 1, 3, 6);
    expect_same_state(plain_state(*second.net), plain_state(*first.net), 0, name);
    expect_same_dict(dict, before, 0, name + ", the argument");
  }
}

TEST(OptimizerStateDict, HasTheWordsOfLibTorch) {
  Plain plain(make_groups);
  train(*plain.net, *plain.optimizer, 1, 0, 2);
  const OptimizerStateDict dict = state_dict_of(*plain.optimizer);
  ASSERT_EQ(dict.param_groups.size(), 2u);
  EXPECT_EQ(dict.param_groups[0].params, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(dict.param_groups[1].params, (std::vector<int64_t>{5, 6, 7}));
  EXPECT_EQ(dict.param_groups[0].options.at("lr").toDouble(), 3e-2);
  EXPECT_EQ(dict.param_groups[1].options.at("amsgrad").toBool(), true);
  ASSERT_EQ(dict.state.size(), 8u);
  EXPECT_EQ(dict.state.at(5).at("step").toInt(), 2);
  EXPECT_EQ(dict.state.at(5).at("exp_avg").toTensor().sizes(), (at::IntArrayRef{kWidth, kWidth}));
  EXPECT_TRUE(dict.state.at(5).contains("max_exp_avg_sq"));
  EXPECT_FALSE(dict.state.at(0).contains("max_exp_avg_sq"));
}

TEST(OptimizerStateDict, ReadsAndWritesTheFilesOfLibTorch) {
  for (const auto& [name, make] : all_optimizers()) {
    Plain plain(make), other(make);
    train(*plain.net, *plain.optimizer, 1, 0, 3);
    const OptimizerStateDict dict = state_dict_of(*plain.optimizer);
    std::stringstream from_torch, from_dict;
    torch::save(*plain.optimizer, from_torch);
    torch::serialize::InputArchive input;
    input.load_from(from_torch);
    expect_same_dict(OptimizerStateDict::load(input), dict, 0, name + ", read");
    torch::serialize::OutputArchive output;
    dict.save(output);
    output.save_to(from_dict);
    torch::load(*other.optimizer, from_dict);
    expect_same_dict(state_dict_of(*other.optimizer), dict, 0, name + ", written");
  }
}

TEST(OptimizerStateDict, OfLbfgsKeepsListsAndNothings) {
  const MakeOptimizer make = [](Net& net) -> std::unique_ptr<Optimizer> {
    return std::make_unique<LBFGS>(net.parameters(), LBFGSOptions(0.1).max_iter(3).history_size(2));
  };
  const auto run = [](Plain& plain, int first, int last) {
    for (int step = first; step < last; ++step) {
      plain.optimizer->step([&] {
        plain.optimizer->zero_grad();
        auto loss = rank_loss(*plain.net, global_batch(step, 12, kWidth, kOut), 0, 1, step);
        loss.backward();
        return loss;
      });
    }
  };
  Plain first(make), second(make);
  run(first, 0, 3);
  run(second, 0, 1);
  const OptimizerStateDict dict = state_dict_of(*first.optimizer);
  load_state_dict(*second.optimizer, dict);
  {
    torch::NoGradGuard no_grad;
    const auto from = first.net->parameters(), to = second.net->parameters();
    for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  }
  run(first, 3, 5);
  run(second, 3, 5);
  expect_same_state(plain_state(*second.net), plain_state(*first.net), 0, "LBFGS");
}

TEST(OptimizerStateDict, AParameterThatIsListedTwiceHasOneNumber) {
  const MakeOptimizer make = [](Net& net) -> std::unique_ptr<Optimizer> {
    auto params = net.parameters();
    params.insert(params.begin() + 2, params[0]);
    return std::make_unique<Adam>(params, AdamOptions(1e-2));
  };
  Plain twice(make), once(all_optimizers()[1].make), again(make);
  train(*once.net, *once.optimizer, 1, 0, 2);
  OptimizerStateDict dict = state_dict_of(*once.optimizer);
  load_state_dict(*twice.optimizer, dict);
  train(*twice.net, *twice.optimizer, 1, 0, 1);
  dict = state_dict_of(*twice.optimizer);
  EXPECT_EQ(dict.param_groups[0].params, (std::vector<int64_t>{0, 1, 0, 2, 3, 4, 5, 6, 7}));
  load_state_dict(*again.optimizer, dict);
  expect_same_dict(state_dict_of(*again.optimizer), dict, 0, "listed twice");
  load_state_dict(*once.optimizer, dict);
  EXPECT_EQ(state_dict_of(*once.optimizer).state.size(), 8u);
}

TEST(OptimizerStateDict, StateThatIsNotInItIsDropped) {
  Plain plain(all_optimizers()[0].make), fresh(all_optimizers()[0].make);
  train(*plain.net, *plain.optimizer, 1, 0, 2);
  OptimizerStateDict dict = state_dict_of(*plain.optimizer);
  dict.state.erase(3);
  load_state_dict(*plain.optimizer, dict);
  expect_same_dict(state_dict_of(*plain.optimizer), dict, 0, "without one");
  load_state_dict(*plain.optimizer, state_dict_of(*fresh.optimizer));
  EXPECT_TRUE(plain.optimizer->state().empty());
}

// --- refusals of plain optimizers
// -------------------------------------------------------------------

struct WithoutSave : SGD {
  using SGD::SGD;
  void save(torch::serialize::OutputArchive& archive) const override { Optimizer::save(archive); }
};
struct WithoutLoad : Adam {
  using Adam::Adam;
  void load(torch::serialize::InputArchive& archive) override { Optimizer::load(archive); }
};

TEST(RefusedOptimizerStateDict, AClassThatSavesOrLoadsNothingIsToldWhatToOverride) {
  Plain plain([](Net& net) { return std::make_unique<WithoutSave>(net.parameters(), 0.1); });
  const OptimizerStateDict dict = state_dict_of(SGD(plain.net->parameters(), 0.1));
  EXPECT_THROW(state_dict_of(*plain.optimizer), c10::NotImplementedError);
  EXPECT_THROW(load_state_dict(*plain.optimizer, dict), c10::NotImplementedError);
  expect_error([&] { state_dict_of(*plain.optimizer); },
               {"[state_dict_of]", "override save() and load()"});
  Plain adam(all_optimizers()[1].make);
  train(*adam.net, *adam.optimizer, 1, 0, 1);
  WithoutLoad without(adam.net->parameters(), 0.1);
  expect_error([&] { load_state_dict(without, state_dict_of(*adam.optimizer)); },
               {"[load_state_dict]", "override load()"});
}

TEST(RefusedOptimizerStateDict, NothingIsChangedByOneThatDoesNotFit) {
  Plain plain(make_groups);
  train(*plain.net, *plain.optimizer, 1, 0, 2);
  const OptimizerStateDict dict = state_dict_of(*plain.optimizer);
  const auto expect_refused = [&](const OptimizerStateDict& wrong,
                                  const std::vector<std::string>& parts) {
    expect_error([&] { load_state_dict(*plain.optimizer, wrong); }, parts);
    expect_same_dict(state_dict_of(*plain.optimizer), dict, 0, parts.back());
  };
  OptimizerStateDict wrong = dict;
  wrong.param_groups.pop_back();
  expect_refused(wrong, {"[load_state_dict]", "param groups; expected 2, got 1"});
  wrong = dict;
  wrong.param_groups[1].params.pop_back();
  expect_refused(wrong, {"expected 3 in param group 1, got 2"});
  // LibTorch's own load() finds this out, after it has set the first group.
  wrong = dict;
  wrong.param_groups[0].options["lr"] = 7.0;
  wrong.param_groups[1].options["lr"] = "fast";
  expect_refused(wrong, {"expected double"});
}

TEST(RefusedOptimizerStateDict, AFileOfAModuleIsNone) {
  std::stringstream file;
  torch::save(make_mlp(), file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  EXPECT_THROW(OptimizerStateDict::load(archive), c10::ValueError);
}

TEST(RefusedOptimizerStateDict, DistTensorsAreLeftToDistOptimizer) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const auto param = distribute(torch::ones({4, 4}), mesh, {Shard{0}});
    SGD optimizer({param}, 0.1);
    EXPECT_THROW(state_dict_of(optimizer), c10::NotImplementedError);
    expect_error([&] { state_dict_of(optimizer); }, {"DistOptimizer::state_dict()"});
  });
}

// --- sharded optimizers
// ----------------------------------------------------------------------------

TEST(FullOptimizerStateDict, IsThatOfAPlainOptimizerAfterTheSameTraining) {
  for (const auto& [name, make] : all_optimizers()) {
    for (const int ranks : {1, 2, 3}) {
      Plain plain(make);
      train(*plain.net, *plain.optimizer, ranks, 0, 3);
      const OptimizerStateDict expected = state_dict_of(*plain.optimizer);
      for (const ShardPlan& plan : plans_for(name)) {
        const std::string what = name + ", " + describe(ranks, plan);
        run_world(ranks, [&](World& world) {
          Job job(make, plan);
          job.train(0, 3);
          const OptimizerStateDict dict = full_state_dict(job.optimizer);
          if (world.rank() == 0) {
            expect_same_dict(dict, expected, close_to(ranks), what);
          } else {
            EXPECT_TRUE(dict.state.empty());
            EXPECT_EQ(dict.param_groups.size(), expected.param_groups.size());
          }
        });
      }
    }
  }
}

TEST(FullOptimizerStateDict, OfAPlainOptimizerOrAnotherWorldLetsASharedOneTrainOn) {
  for (const auto& [name, make] : all_optimizers()) {
    Plain plain(make);
    train(*plain.net, *plain.optimizer, 2, 0, 3);
    OptimizerStateDict plain_dict = state_dict_of(*plain.optimizer), sharded_dict;
    const auto start = plain_state(*plain.net);
    train(*plain.net, *plain.optimizer, 2, 3, 5);
    run_world(2, [&](World& world) {
      Job job(make, {.partition = Partition::kWholeParam, .unit_bytes = 600});
      job.train(0, 3);
      OptimizerStateDict dict = full_state_dict(job.optimizer, 1);
      if (world.rank() == 1) sharded_dict = std::move(dict);
    });
    for (const OptimizerStateDict* const dict : {&plain_dict, &sharded_dict}) {
      const OptimizerStateDict before = copy_of(*dict);
      for (const int ranks : {1, 2, 3}) {
        for (const ShardPlan& plan : plans_for(name)) {
          const std::string what = name + ", " + describe(ranks, plan);
          run_world(ranks, [&](World& world) {
            Job job(make, plan);
            job.train(5, 6);  // other state, which is to be replaced
            auto* const options = &job.inner->param_groups()[0].options();
            load_full_state_dict(job.optimizer, *dict);
            EXPECT_EQ(&job.inner->param_groups()[0].options(), options);
            EXPECT_EQ(job.optimizer.steps(), 1);
            expect_same_dict(full_state_dict(job.optimizer, -1), *dict, 0, what);
            job.sharded.load_full_state(start);
            job.train(3, 5);
            expect_same_state(job.sharded.full_state(), plain_state(*plain.net), close_to(3), what);
          });
        }
      }
      expect_same_dict(*dict, before, 0, name + ", the argument");
    }
  }
}

TEST(FullOptimizerStateDict, OfAShardedOptimizerLetsAPlainOneTrainOn) {
  for (const auto& [name, make] : all_optimizers()) {
    Plain expected(make);
    train(*expected.net, *expected.optimizer, 3, 0, 5);
    run_world(3, [&](World& world) {
      Job job(make, {.unit_bytes = 600});
      job.train(0, 3);
      const OptimizerStateDict dict = full_state_dict(job.optimizer, 2);
      const auto start = job.sharded.full_state();
      if (world.rank() != 2) return;
      Plain plain(make);
      load_state_dict(*plain.optimizer, dict);
      {
        torch::NoGradGuard no_grad;
        for (const auto& item : start) plain.net->named_parameters()[item.name].copy_(item.tensor);
      }
      train(*plain.net, *plain.optimizer, 3, 3, 5);
      expect_same_state(plain_state(*plain.net), plain_state(*expected.net), close_to(3), name);
    });
  }
}

TEST(FullOptimizerStateDict, IsOnTheRecipientAloneOrOnAll) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job job(make_groups, {.unit_bytes = 600});
      job.train(0, 1);
      const OptimizerStateDict all = full_state_dict(job.optimizer, -1);
      EXPECT_EQ(all.state.size(), 8u);
      for (int recipient = 0; recipient < ranks; ++recipient) {
        const OptimizerStateDict dict = full_state_dict(job.optimizer, recipient);
        if (world.rank() == recipient) {
          expect_same_dict(dict, all, 0, fmt::format("recipient {}", recipient));
        } else {
          EXPECT_TRUE(dict.state.empty());
        }
      }
    });
  }
}

TEST(FullOptimizerStateDict, LeavesParametersThatWereNeverSteppedWithoutState) {
  for (const int ranks : {1, 2, 3}) {
    for (const ShardPlan& plan : all_plans()) {
      run_world(ranks, [&](World& world) {
        Job job(make_groups, plan);
        EXPECT_TRUE(full_state_dict(job.optimizer, -1).state.empty());
        torch::square(job.net->fcs[0](torch::ones({2, kWidth}))).sum().backward();
        job.optimizer.step();
        const OptimizerStateDict dict = full_state_dict(job.optimizer, -1);
        ASSERT_EQ(dict.state.size(), 2u) << describe(ranks, plan);
        EXPECT_TRUE(dict.state.contains(0) && dict.state.contains(5));
        job.train(0, 1);
        load_full_state_dict(job.optimizer, dict);
        expect_same_dict(full_state_dict(job.optimizer, -1), dict, 0, describe(ranks, plan));
      });
    }
  }
}

struct Tiny : Net {
  Tiny() {
    scale = register_parameter("scale", torch::full({1}, 2.0));
    shift = register_parameter("shift", torch::full({}, 3.0));
    pair = register_parameter("pair", torch::full({1, 2}, 4.0));
  }
  torch::Tensor forward(torch::Tensor x) override { return x * scale + shift + pair.sum(); }
  torch::Tensor scale, shift, pair;
};

TEST(FullOptimizerStateDict, HandlesSingleElementsAndRanksWithoutAny) {
  const auto step = [](Tiny& net, Optimizer* plain, ShardedOptimizer* sharded) {
    torch::square(net.forward(torch::ones({2, 2}))).sum().backward();
    plain ? (void)plain->step() : sharded->step();
  };
  for (const int ranks : {1, 2, 3, 4}) {
    for (const ShardPlan& plan : all_plans()) {
      Tiny alone;
      HeavyBall plain(alone.parameters(), 0.1);
      step(alone, &plain, nullptr);
      const OptimizerStateDict expected = state_dict_of(plain);
      run_world(ranks, [&](World& world) {
        auto net = std::make_shared<Tiny>();
        HeavyBall inner(net->parameters(), 0.1);
        auto sharded = fully_shard(net, plan);
        ShardedOptimizer optimizer(sharded, inner);
        step(*net, nullptr, &optimizer);
        OptimizerStateDict dict = full_state_dict(optimizer, -1);
        expect_same_dict(dict, expected, 1e-5, describe(ranks, plan));
        for (auto& [number, values] : dict.state) values["speed"] = values["speed"].toTensor() + 1;
        load_full_state_dict(optimizer, dict);
        expect_same_dict(full_state_dict(optimizer, -1), dict, 0, describe(ranks, plan));
      });
    }
  }
}

TEST(FullOptimizerStateDict, OfReplicasIsOnThatRankOfEach) {
  run_world(4, [](World& world) {
    const auto process_groups = world.hybrid_process_groups(2);
    Job job(make_groups, {.unit_bytes = 600,
                          .process_group = process_groups.shard,
                          .replicate_group = process_groups.replicate});
    job.optimizer.zero_grad();
    rank_loss(*job.net, global_batch(0, 12, kWidth, kOut), world.rank(), 4, 0).backward();
    job.optimizer.step();
    const OptimizerStateDict all = full_state_dict(job.optimizer, -1);
    const OptimizerStateDict dict = full_state_dict(job.optimizer, 1);
    EXPECT_EQ(dict.state.size(), world.rank() % 2 == 1 ? 8u : 0u);
    Plain plain(make_groups);
    train(*plain.net, *plain.optimizer, 4, 0, 1);
    expect_same_dict(all, state_dict_of(*plain.optimizer), 1e-6, "replicas");
    load_full_state_dict(job.optimizer, all);
    expect_same_dict(full_state_dict(job.optimizer, -1), all, 0, "loaded");
  });
}

TEST(FullOptimizerStateDict, GoesToWhereStateIsOffloadedTo) {
  run_world(2, [](World& world) {
    ShardPlan plan{.unit_bytes = 600};
    Job first(make_groups, plan);
    first.train(0, 2);
    const OptimizerStateDict dict = full_state_dict(first.optimizer, -1);
    plan.offload = Offload::kHost;
    Job second(make_groups, plan);
    load_full_state_dict(second.optimizer, dict);
    expect_same_dict(full_state_dict(second.optimizer, -1), dict, 0, "offloaded");
    const auto& memory = second.sharded.state()->context().offload;
    int64_t tensors = 0;
    for (const auto& item : second.inner->state()) {
      EXPECT_TRUE(memory->holds(static_cast<AdamWParamState&>(*item.second).exp_avg()));
      ++tensors;
    }
    EXPECT_GT(tensors, 0);
    second.sharded.load_full_state(first.sharded.full_state());
    first.train(2, 4);
    second.train(2, 4);
    expect_same_state(second.sharded.full_state(), first.sharded.full_state(), 1e-6, "offloaded");
  });
}

TEST(FullOptimizerStateDict, OfANarrowModelWidensToTheMasters) {
  const auto make = all_optimizers()[0].make;
  Plain plain(make);
  plain.net->to(torch::kBFloat16);
  for (const auto& param : plain.net->parameters()) param.mutable_grad() = param.detach().clone();
  plain.optimizer->step();
  const OptimizerStateDict dict = state_dict_of(*plain.optimizer);
  EXPECT_EQ(dict.state.at(0).at("exp_avg").toTensor().scalar_type(), torch::kBFloat16);
  run_world(2, [&](World& world) {
    Job job(make, {.unit_bytes = 600, .precision = {.param_dtype = torch::kBFloat16}});
    load_full_state_dict(job.optimizer, dict);
    const OptimizerStateDict loaded = full_state_dict(job.optimizer, -1);
    const auto got = loaded.state.at(0).at("exp_avg").toTensor();
    EXPECT_EQ(got.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(got, dict.state.at(0).at("exp_avg").toTensor().to(torch::kFloat)));
  });
}

// --- refusals of sharded optimizers
// ------------------------------------------------------------------

// On all ranks of several worlds; nothing is changed.
void expect_refused(const std::function<void(World&, Job&)>& f) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job job(make_groups, {.unit_bytes = 600});
      job.train(0, 2);
      const OptimizerStateDict before = full_state_dict(job.optimizer, -1);
      f(world, job);
      expect_same_dict(full_state_dict(job.optimizer, -1), before, 0, "after a refusal");
    });
  }
}

TEST(RefusedFullOptimizerStateDict, ARecipientMustBeARankAndTheSameOnAll) {
  expect_refused([](World& world, Job& job) {
    for (const int wrong : {-2, world.size()}) {
      EXPECT_THROW(full_state_dict(job.optimizer, wrong), c10::ValueError);
      const int on_one = world.rank() == 0 ? wrong : 0;
      expect_error([&] { full_state_dict(job.optimizer, on_one); },
                   {"[full_state_dict] `recipient`", fmt::format("got {}", wrong)});
    }
    if (world.size() > 1) {
      EXPECT_THROW(full_state_dict(job.optimizer, world.rank() == 0 ? 0 : 1), c10::ValueError);
    }
  });
}

TEST(RefusedFullOptimizerStateDict, ItMustHaveTheParametersOfTheOptimizer) {
  expect_refused([](World& world, Job& job) {
    const OptimizerStateDict dict = full_state_dict(job.optimizer, -1);
    const auto refuse = [&](const OptimizerStateDict& wrong,
                            const std::vector<std::string>& parts) {
      EXPECT_THROW(load_full_state_dict(job.optimizer, wrong), c10::ValueError);
      expect_error([&] { load_full_state_dict(job.optimizer, wrong); }, parts);
    };
    OptimizerStateDict wrong = dict;
    wrong.param_groups.pop_back();
    refuse(wrong, {"[load_full_state_dict]", "param groups; expected 2, got 1"});
    wrong = dict;
    wrong.param_groups[0].params.pop_back();
    refuse(wrong, {"expected 5 in param group 0, got 4"});
    wrong = dict;
    wrong.state[6]["exp_avg"] = torch::zeros({kWidth, kWidth + 1});
    refuse(wrong, {"'exp_avg' of 'fc1.weight'", "[9, 9]", "[9, 10]"});
    wrong = dict;
    wrong.state[7]["exp_avg"] = torch::zeros({kWidth, kOut});
    refuse(wrong, {"'exp_avg' of 'head.weight'", "[5, 9]", "[9, 5]"});
    // Of another model altogether.
    wrong = dict;
    for (auto& [number, values] : wrong.state) values["exp_avg"] = torch::zeros({64 + number});
    refuse(wrong, {"'exp_avg' of 'fc0.bias'", "[9]", "[64]"});
    if (world.size() > 1) {
      wrong = dict;
      if (world.rank() == 1) wrong.state.clear();
      refuse(wrong, {"every rank must give the same state", "8 parameters", "0 parameters"});
      if (world.rank() == 0) wrong.state[6]["exp_avg"] = torch::zeros({3, 3});
      if (world.rank() != 0) wrong = dict;
      refuse(wrong, {"'exp_avg' of 'fc1.weight'"});
    }
  });
}

TEST(RefusedFullOptimizerStateDict, WhatLoadFindsOnOneRankUndoesItOnAll) {
  expect_refused([](World& world, Job& job) {
    OptimizerStateDict wrong = full_state_dict(job.optimizer, -1);
    wrong.param_groups[0].options["lr"] = 7.0;
    for (auto& [number, values] : wrong.state) values["step"] = 100;
    if (world.rank() == world.size() - 1) wrong.param_groups[1].options["lr"] = "fast";
    expect_error([&] { load_full_state_dict(job.optimizer, wrong); }, {"expected double"});
    EXPECT_EQ(job.inner->param_groups()[0].options().get_lr(), 3e-2);
  });
}

struct FailsToSave : SGD {
  using SGD::SGD;
  void save(torch::serialize::OutputArchive& archive) const override {
    if (fails) throw std::runtime_error("the disk of this rank is full");
    SGD::save(archive);
  }
  bool fails = false;
};

TEST(RefusedFullOptimizerStateDict, AClassWithoutSaveOrOneThatThrowsStopsAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job without([](Net& net) { return std::make_unique<WithoutSave>(net.parameters(), 0.1); },
                  {});
      EXPECT_THROW(full_state_dict(without.optimizer), c10::NotImplementedError);
      OptimizerStateDict dict = state_dict_of(SGD(make_mlp()->parameters(), 0.1));
      EXPECT_THROW(load_full_state_dict(without.optimizer, dict), c10::NotImplementedError);
      Job fails([](Net& net) { return std::make_unique<FailsToSave>(net.parameters(), 0.1); }, {});
      static_cast<FailsToSave&>(*fails.inner).fails = world.rank() == 0;
      expect_error([&] { full_state_dict(fails.optimizer); }, {"the disk of this rank is full"});
    });
  }
}

TEST(RefusedFullOptimizerStateDict, AddedParametersAreNotTheModels) {
  expect_refused([](World&, Job& job) {
    auto& params = job.inner->param_groups()[0].params();
    params.push_back(torch::zeros({3}));
    expect_error([&] { full_state_dict(job.optimizer); },
                 {"when the ShardedOptimizer was made; expected 8, got 9"});
    params.pop_back();
  });
}

// --- shapes
// ----------------------------------------------------------------------------------------

TEST(OptimizerStateShapes, AValueForEachRowOrOneShapeForAllFits) {
  const auto check = [](const std::vector<std::vector<int64_t>>& params,
                        const std::vector<std::vector<int64_t>>& state) {
    std::vector<Values> values;
    for (const auto& sizes : state) values.push_back({{"value", torch::zeros(sizes)}});
    std::vector<ParamValues> items;
    for (size_t i = 0; i < params.size(); ++i)
      items.push_back({fmt::format("p{}", i), params[i], values[i]});
    check_shapes(items, "check");
  };
  check({{4, 3}, {5}}, {{4, 3}, {5}});       // each element
  check({{4, 3}, {5, 2}}, {{4}, {5}});       // each row
  check({{4, 3}, {5, 2}}, {{2}, {2}});       // the same for all
  check({{4, 3}, {5}, {1}}, {{1}, {}, {}});  // counts
  expect_error([&] { check({{4, 3}, {5}}, {{4, 3}, {1}}); }, {"'value' of 'p1'", "[5]", "[1]"});
  expect_error([&] { check({{4, 3}, {5}}, {{3, 4}, {5}}); }, {"'value' of 'p0'"});
  expect_error([&] { check({{4, 3}, {5}}, {{6, 3}, {7}}); }, {"'value' of 'p0'"});
  expect_error([&] { check({{4, 3}}, {{2}}); }, {"'value' of 'p0'", "[4, 3]", "[2]"});
}

}  // namespace
}  // namespace tessera
