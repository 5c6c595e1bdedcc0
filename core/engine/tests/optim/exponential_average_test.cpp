// Moving averages of sharded parameters.
#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/engine/exponential_average.h>

#include <set>

#include "engine/model/sharded_state.h"
#include "engine/optim/averaged_weights.h"
#include "support/error_of.h"
#include "support/models.h"
#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::exponential_average_test {

constexpr double kDecay = 0.75;  // exact in float, and so is 1 - kDecay

TrainingRun run_in(torch::Dtype dtype) {
  return in_dtype(run_by<Mlp, torch::optim::SGD>(torch::optim::SGDOptions(0.1)), dtype);
}

struct Job : ShardedJob<Mlp> {
  explicit Job(World& world, const ShardPlan& plan = {}, torch::Dtype dtype = torch::kFloat)
      : ShardedJob(run_in(dtype), world, plan), average(sharded, kDecay) {}

  void train(int first, int last) {
    for (int i = first; i < last; ++i) step(i), average.update();
  }
  State averaged() {
    return average.evaluate([&] { return state(); });
  }

  ExponentialAverage average;
};

// By full tensors, step by step.
void follow(std::vector<NamedTensor>& mean, const std::vector<NamedTensor>& now) {
  torch::NoGradGuard no_grad;
  if (mean.empty()) {
    for (const NamedTensor& item : now) mean.push_back({item.name, item.tensor.clone()});
    return;
  }
  for (size_t i = 0; i < mean.size(); ++i) mean[i].tensor.lerp_(now[i].tensor, 1 - kDecay);
}

void expect_average(Job& job, double tolerance, const std::string& what) {
  std::vector<NamedTensor> want;
  for (int step = 0; step < 4; ++step) {
    job.train(step, step + 1);
    follow(want, job.state());
  }
  const auto trained = job.state();
  expect_same_state(job.averaged(), want, tolerance, what + ", averaged");
  expect_same_state(job.state(), trained, 0, what + ", after evaluate()");
  EXPECT_EQ(job.average.updates(), 4);
}

TEST(ExponentialAverage, EqualsTheAverageOfFullParametersAtEachLevel) {
  on_worlds({1, 2, 3}, with_each_partition({.unit_bytes = 3000}),
            [](World& world, const ShardPlan& plan) {
              Job job(world, plan);
              expect_average(job, 1e-6, "");  // vectorized loops begin at other elements
            });
}

TEST(ExponentialAverage, SendsNothingInAStep) {
  run_world(2, [](World& world) {
    const auto counting = counting_process_group(world.process_group());
    Job job(world, {.process_group = counting});
    job.train(0, 1);
    const auto before = counting->counts();
    job.average.update();
    EXPECT_EQ(counting->counts().calls(), before.calls());
  });
}

// Evaluating rounds the model's values, but not the average: it goes on from the same bits.
TEST(ExponentialAverage, IsKeptInFloatForHalfPrecisions) {
  run_world(2, [](World& world) {
    Job job(world, {}, torch::kBFloat16), other(world, {}, torch::kBFloat16);
    job.train(0, 3);
    for (const NamedTensor& item : job.averaged())
      EXPECT_EQ(item.tensor.scalar_type(), torch::kBFloat16);
    other.train(0, 3);
    job.train(3, 5);
    other.train(3, 5);
    expect_same_state(job.averaged(), other.averaged(), 0, "evaluated or not");
  });
}

TEST(ExponentialAverage, UsesMasterWeightsAndOffloadedOnes) {
  run_world(2, [](World& world) {
    for (const Offload offload : {Offload::kNone, Offload::kHost}) {
      Job job(world, {.precision = {.param_dtype = torch::kBFloat16}, .offload = offload});
      job.train(0, 4);
      job.average.swap();
      EXPECT_TRUE(job.average.is_swapped());
      job.average.swap();
      EXPECT_FALSE(job.average.is_swapped());
      job.train(4, 5);
    }
  });
}

// The head alone is trained, in the first steps. Units have parameters of one kind.
struct FrozenJob {
  explicit FrozenJob(const ShardPlan& plan)
      : net(std::static_pointer_cast<Mlp>(run_in(torch::kFloat).make_net())),
        inner(net->parameters(), torch::optim::SGDOptions(0.1)),
        sharded(fully_shard(freeze(), plan)),
        optimizer(sharded, inner),
        average(sharded, kDecay) {}

  std::shared_ptr<Mlp> freeze() {
    for (auto& param : net->parameters()) param.requires_grad_(false);
    net->head->weight.requires_grad_(true);
    return net;
  }
  void step(int batch) {
    optimizer.zero_grad();
    const Batch rows = global_batch(batch, 12, 37, 5);
    torch::mse_loss(net->forward(rows.x.to(net->dtype())), rows.y.to(net->dtype())).backward();
    optimizer.step();
    average.update();
  }
  // The units that have an average.
  std::set<std::string> kept() const {
    std::set<std::string> names;
    const auto& values = average.weights()->values;
    for (size_t unit = 0; unit < values.size(); ++unit)
      if (values[unit].defined()) names.insert(sharded.state()->units()[unit]->layout().name);
    return names;
  }
  State averaged() {
    return average.evaluate([&] { return sharded.full_state(); });
  }

  std::shared_ptr<Mlp> net;
  torch::optim::SGD inner;
  Sharded<Mlp> sharded;
  ShardedOptimizer optimizer;
  ExponentialAverage average;
};

TEST(ExponentialAverage, FrozenUnitsHaveNoneUntilTheyThaw) {
  on_worlds({1, 2, 3}, at_each_level({.unit_bytes = 0}), [](World&, const ShardPlan& plan) {
    FrozenJob job(plan);
    std::vector<NamedTensor> want;
    for (int batch = 0; batch < 3; ++batch) job.step(batch), follow(want, job.sharded.full_state());
    EXPECT_EQ(job.kept(), std::set<std::string>{"head.weight"});
    expect_same_state(job.averaged(), want, 1e-6, "frozen");
    job.net->fcs[0]->weight.requires_grad_(true);
    job.step(3);
    const auto now = job.sharded.full_state();
    follow(want, now);
    for (size_t i = 0; i < now.size(); ++i)  // it starts here
      if (now[i].name == "fc0.weight") want[i].tensor = now[i].tensor.clone();
    job.step(4);
    follow(want, job.sharded.full_state());
    EXPECT_EQ(job.kept(), (std::set<std::string>{"fc0.weight", "head.weight"}));
    // Frozen again, it is still averaged.
    job.net->fcs[0]->weight.requires_grad_(false);
    job.step(5);
    follow(want, job.sharded.full_state());
    EXPECT_EQ(job.kept().size(), 2);
    expect_same_state(job.averaged(), want, 1e-6, "thawed");
  });
}

TEST(ExponentialAverage, CheckpointsHaveThoseOfFrozenParameters) {
  const ScratchDirectory scratch;
  for (const Precision& precision :
       {Precision(), Precision{.param_dtype = at::kBFloat16, .round_frozen = true}}) {
    run_world(2, [&](World&) {
      const ShardPlan plan{.unit_bytes = 0, .precision = precision};
      FrozenJob job(plan);
      job.step(0);
      job.step(1);
      const auto averaged = job.averaged();
      save_checkpoint(scratch / "both",
                      {{"model", job.sharded, &job.optimizer}, {"average", job.average}});
      FrozenJob other(plan);
      const auto load = [&] {
        load_checkpoint(scratch / "both",
                        {{"model", other.sharded, &other.optimizer}, {"average", other.average}});
      };
      load();
      {
        torch::NoGradGuard no_grad;
        for (torch::Tensor& param : other.net->parameters()) param.mul_(2);
      }
      expect_same_state(other.averaged(), averaged, 0, "loaded");
      load();
      EXPECT_EQ(other.kept().size(), other.sharded.state()->units().size());
      job.step(2);
      other.step(2);
      EXPECT_EQ(other.kept(), std::set<std::string>{"head.weight"});
      expect_same_state(other.averaged(), job.averaged(), 0, "a step later");
      FrozenJob model(plan);
      load_checkpoint(scratch / "both" / "average", model.sharded, nullptr);
      expect_same_state(model.sharded.full_state(), averaged, 0, "as a model");
    });
  }
}

TEST(ExponentialAverage, WrongUseIsRefused) {
  run_world(2, [](World& world) {
    Job job(world);
    EXPECT_EQ(error_of([&] { ExponentialAverage average(job.sharded, 1); }),
              "[ExponentialAverage] decay must be 0 or more and less than 1; got 1");
    expect_contains(error_of([&] { job.average.swap(); }), {"call update() after a step"});
    job.train(0, 1);
    job.average.swap();
    expect_contains(error_of([&] { job.average.update(); }), {"call swap()"});
    job.average.swap();
    EXPECT_THROW(job.average.evaluate([] { throw std::runtime_error("no"); }), std::runtime_error);
    EXPECT_TRUE(job.average.is_swapped());
    job.average.swap();
    job.train(1, 2);
  });
}

// What is written while the model has the average would be lost when it gets its own values back.
TEST(ExponentialAverage, StepsAndLoadsAreRefusedWhileTheModelHasIt) {
  const ScratchDirectory scratch;
  on_worlds({1, 2}, at_each_level(), [&](World& world, const ShardPlan& plan) {
    Job job(world, plan);
    job.train(0, 2);
    const auto trained = job.state();
    save_checkpoint(scratch / "one", job.sharded, &job.optimizer);
    job.average.swap();
    const auto averaged = job.state();
    job.backward(0);
    const auto refuses = [](const char* function, const std::function<void()>& call) {
      expect_error(call, {function, "values of an ExponentialAverage", "call swap()"});
    };
    refuses("[step]", [&] { job.optimizer.step(); });
    refuses("[load_full_state]", [&] { job.sharded.load_full_state(trained); });
    refuses("[load_checkpoint]",
            [&] { load_checkpoint(scratch / "one", job.sharded, &job.optimizer); });
    expect_same_state(job.state(), averaged, 0, "refused");
    job.average.swap();
    expect_same_state(job.state(), trained, 0, "its own values");
    job.train(2, 3);
  });
}

TEST(ExponentialAverage, AnotherOneWaitsUntilTheModelHasItsOwnValues) {
  run_world(2, [](World& world) {
    Job job(world);
    ExponentialAverage other(job.sharded, 0.5);
    job.train(0, 1);
    other.update();
    job.average.swap();
    for (const std::function<void()>& call :
         std::vector<std::function<void()>>{[&] { other.swap(); }, [&] { other.update(); }})
      expect_contains(error_of(call), {"the values of another average"});
    job.average.swap();
    other.swap();
    EXPECT_TRUE(other.is_swapped());
  });
}

TEST(ExponentialAverage, GoneWhileTheModelHasItItsValuesAreTheModels) {
  run_world(2, [](World& world) {
    Job job(world);
    job.train(0, 2);
    {
      ExponentialAverage brief(job.sharded, 0.5);
      brief.update();
      brief.swap();
    }
    job.train(2, 3);
  });
}

TEST(ExponentialAverage, AnUnwrappedModelKeepsTheValuesThatItHas) {
  on_worlds({1, 2}, {{}}, [](World&, const ShardPlan& plan) {
    const auto net = std::static_pointer_cast<Mlp>(run_in(torch::kFloat).make_net());
    auto sharded = fully_shard(net, plan);
    ExponentialAverage average(sharded, kDecay);
    average.update();
    {
      torch::NoGradGuard no_grad;
      for (const torch::Tensor& param : net->parameters()) param.add_(1);
    }
    average.update();
    average.swap();
    const auto averaged = sharded.full_state();
    sharded.unwrap();
    expect_same_state(plain_state(*net), averaged, 0, "unwrapped");
    expect_error([&] { average.swap(); }, {"[ExponentialAverage] the model was unwrapped"});
    expect_error([&] { average.update(); }, {"[ExponentialAverage] the model was unwrapped"});
    expect_same_state(plain_state(*net), averaged, 0, "still");
  });
}

}  // namespace tessera::testing::exponential_average_test
