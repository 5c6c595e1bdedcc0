// Moving averages of sharded parameters.
#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/engine/exponential_average.h>

#include "engine/model/sharded_state.h"
#include "support/error_of.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera::testing {
namespace exponential_average_test {

constexpr double kDecay = 0.75;  // exact in float, and so is 1 - kDecay

std::shared_ptr<Mlp> make_net(torch::Dtype dtype) {
  auto net = seeded(3, [] { return std::make_shared<Mlp>(); });
  net->to(dtype);
  return net;
}

struct Job {
  explicit Job(const ShardPlan& plan, torch::Dtype dtype = torch::kFloat)
      : net(make_net(dtype)),
        sharded(fully_shard(net, plan)),
        sgd(net->parameters(), torch::optim::SGDOptions(0.1)),
        optimizer(sharded, sgd),
        average(sharded, kDecay) {}

  void train(int first, int last) {
    for (int step = first; step < last; ++step) {
      const Batch batch = global_batch(step, 12, 37, 5);
      optimizer.zero_grad();
      const torch::Tensor x = batch.x.to(net->head->weight.scalar_type());
      torch::mse_loss(net->forward(x).to(torch::kFloat), batch.y).backward();
      optimizer.step();
      average.update();
    }
  }

  std::shared_ptr<Mlp> net;
  Sharded<Mlp> sharded;
  torch::optim::SGD sgd;
  ShardedOptimizer optimizer;
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
    follow(want, job.sharded.full_state());
  }
  const auto trained = job.sharded.full_state();
  const auto averaged = job.average.evaluate([&] { return job.sharded.full_state(); });
  expect_same_state(averaged, want, tolerance, what + ", averaged");
  expect_same_state(job.sharded.full_state(), trained, 0, what + ", after evaluate()");
  EXPECT_EQ(job.average.updates(), 4);
}

TEST(ExponentialAverage, EqualsTheAverageOfFullParametersAtEachLevel) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World&) {
      for (const ShardLevel level : kAllLevels) {
        for (const Partition partition : {Partition::kFlatEven, Partition::kWholeParam}) {
          Job job({.level = level, .partition = partition, .unit_bytes = 3000});
          // Vectorized loops begin at other elements.
          expect_average(
              job, 1e-6,
              std::to_string(ranks) + " ranks, level " + std::to_string(static_cast<int>(level)));
        }
      }
    });
  }
}

TEST(ExponentialAverage, SendsNothingInAStep) {
  run_world(2, [](World& world) {
    const auto counting = counting_process_group(world.process_group());
    Job job({.process_group = counting});
    job.train(0, 1);
    const auto before = counting->counts();
    job.average.update();
    EXPECT_EQ(counting->counts().calls(), before.calls());
  });
}

// Evaluating rounds the model's values, but not the average: it goes on from the same bits.
TEST(ExponentialAverage, IsKeptInFloatForHalfPrecisions) {
  run_world(2, [](World&) {
    Job job({}, torch::kBFloat16);
    job.train(0, 3);
    const auto first = job.average.evaluate([&] { return job.sharded.full_state(); });
    for (const NamedTensor& item : first) EXPECT_EQ(item.tensor.scalar_type(), torch::kBFloat16);
    Job other({}, torch::kBFloat16);
    other.train(0, 3);
    job.train(3, 5);
    other.train(3, 5);
    expect_same_state(job.average.evaluate([&] { return job.sharded.full_state(); }),
                      other.average.evaluate([&] { return other.sharded.full_state(); }), 0,
                      "evaluated or not");
  });
}

TEST(ExponentialAverage, UsesMasterWeightsAndOffloadedOnes) {
  run_world(2, [](World&) {
    for (const Offload offload : {Offload::kNone, Offload::kHost}) {
      Job job({.precision = {.param_dtype = torch::kBFloat16}, .offload = offload});
      job.train(0, 4);
      job.average.swap();
      EXPECT_TRUE(job.average.is_swapped());
      job.average.swap();
      EXPECT_FALSE(job.average.is_swapped());
      job.train(4, 5);
    }
  });
}

TEST(ExponentialAverage, WrongUseIsRefused) {
  run_world(2, [](World&) {
    Job job({});
    EXPECT_EQ(error_of([&] { ExponentialAverage average(job.sharded, 1); }),
              "[ExponentialAverage] decay must be 0 or more and less than 1; got 1");
    EXPECT_NE(error_of([&] { job.average.swap(); }).find("call update() after a step"),
              std::string::npos);
    job.train(0, 1);
    job.average.swap();
    EXPECT_NE(error_of([&] { job.average.update(); }).find("call swap()"), std::string::npos);
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
  for (const int ranks : {1, 2}) {
    run_world(ranks, [&](World&) {
      for (const ShardLevel level : kAllLevels) {
        Job job({.level = level});
        job.train(0, 2);
        const auto trained = job.sharded.full_state();
        save_checkpoint(scratch / "one", job.sharded, &job.optimizer);
        job.average.swap();
        const auto averaged = job.sharded.full_state();
        torch::mse_loss(job.net->forward(global_batch(0, 12, 37, 5).x), torch::zeros({12, 5}))
            .backward();
        const auto refuses = [](const char* function, const std::function<void()>& call) {
          expect_error(call, {function, "values of an ExponentialAverage", "call swap()"});
        };
        refuses("[step]", [&] { job.optimizer.step(); });
        refuses("[load_full_state]", [&] { job.sharded.load_full_state(trained); });
        refuses("[load_checkpoint]",
                [&] { load_checkpoint(scratch / "one", job.sharded, &job.optimizer); });
        expect_same_state(job.sharded.full_state(), averaged, 0, "refused");
        job.average.swap();
        expect_same_state(job.sharded.full_state(), trained, 0, "its own values");
        job.train(2, 3);
      }
    });
  }
}

TEST(ExponentialAverage, AnotherOneWaitsUntilTheModelHasItsOwnValues) {
  run_world(2, [](World&) {
    Job job({});
    ExponentialAverage other(job.sharded, 0.5);
    job.train(0, 1);
    other.update();
    job.average.swap();
    for (const std::function<void()>& call :
         std::vector<std::function<void()>>{[&] { other.swap(); }, [&] { other.update(); }})
      EXPECT_NE(error_of(call).find("the values of another average"), std::string::npos);
    job.average.swap();
    other.swap();
    EXPECT_TRUE(other.is_swapped());
  });
}

TEST(ExponentialAverage, GoneWhileTheModelHasItItsValuesAreTheModels) {
  run_world(2, [](World&) {
    Job job({});
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
  for (const int ranks : {1, 2}) {
    run_world(ranks, [](World&) {
      const auto net = make_net(torch::kFloat);
      auto sharded = fully_shard(net);
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
}

}  // namespace exponential_average_test
}  // namespace tessera::testing
