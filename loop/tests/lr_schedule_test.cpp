// Learning rates by the number of the step.
#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/loop/lr_schedule.h>

#include "support/error_of.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera::testing {
namespace lr_schedule_test {

using torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::SGD, torch::optim::SGDOptions;

std::vector<torch::Tensor> one_parameter() { return {torch::zeros({1}, torch::requires_grad())}; }

double rate(const torch::optim::Optimizer& optimizer, size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}
double momentum(torch::optim::Optimizer& optimizer) {
  auto& options = optimizer.param_groups()[0].options();
  if (const auto* adamw = dynamic_cast<AdamWOptions*>(&options)) return std::get<0>(adamw->betas());
  return dynamic_cast<SGDOptions&>(options).momentum();
}

struct Seen {
  double rate, momentum;
};
template <class Schedule>
std::vector<Seen> seen(torch::optim::Optimizer& optimizer, Schedule& schedule, int steps) {
  std::vector<Seen> result;
  for (int step = 0; step < steps; ++step) {
    result.push_back({rate(optimizer), momentum(optimizer)});
    schedule.step();
  }
  return result;
}

void expect_seen(const std::vector<Seen>& got, const std::vector<Seen>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(got[i].rate, want[i].rate, 1e-12) << i;
    EXPECT_NEAR(got[i].momentum, want[i].momentum, 1e-12) << i;
  }
}

// The numbers of PyTorch 2.13's scheduler of this name.
TEST(OneCycleLR, EqualsPyTorch) {
  AdamW adamw(one_parameter(), AdamWOptions(0.1));
  OneCycleLR cosine(adamw, {.steps = 10});
  expect_seen(seen(adamw, cosine, 10), {{0.004, 0.95},
                                        {0.052, 0.9},
                                        {0.1, 0.85},
                                        {0.095048463201, 0.854951556604879},
                                        {0.081174565395, 0.8688255099070633},
                                        {0.061126202194, 0.8888739533021842},
                                        {0.038874197806, 0.9111260466978157},
                                        {0.018825834605, 0.9311744900929366},
                                        {0.004951936799, 0.945048443395121},
                                        {4e-07, 0.95}});
  EXPECT_DOUBLE_EQ(rate(adamw), 4e-07);  // and stays there

  SGD sgd(one_parameter(), SGDOptions(0.1).momentum(0.9));
  OneCycleLR phases(sgd,
                    {.steps = 10, .warmup_fraction = 0.4, .linear = true, .three_phases = true});
  expect_seen(seen(sgd, phases, 10), {{0.004, 0.95},
                                      {0.036, 0.9166666666666666},
                                      {0.068, 0.8833333333333333},
                                      {0.1, 0.85},
                                      {0.068, 0.8833333333333333},
                                      {0.036, 0.9166666666666666},
                                      {0.004, 0.95},
                                      {0.0026668, 0.95},
                                      {0.0013336, 0.95},
                                      {4e-07, 0.95}});

  SGD plain(one_parameter(), SGDOptions(0.1));
  OneCycleLR rates(plain, {.steps = 10,
                           .warmup_fraction = 0.25,
                           .initial_divisor = 10,
                           .final_divisor = 100,
                           .cycle_momentum = false});
  expect_seen(seen(plain, rates, 10), {{0.01, 0},
                                       {0.0775, 0},
                                       {0.098908472657, 0},
                                       {0.090460398869, 0},
                                       {0.075025, 0},
                                       {0.05527119674, 0},
                                       {0.034614601131, 0},
                                       {0.016626926212, 0},
                                       {0.004418404391, 0},
                                       {0.0001, 0}});
}

TEST(LambdaLR, WarmupThenCosineOrLine) {
  SGD sgd(one_parameter(), SGDOptions(2));
  LambdaLR cosine(sgd, warmup_cosine({.warmup = 2, .steps = 7, .final_factor = 0.5}));
  const double half = std::sqrt(0.5);
  expect_seen(
      seen(sgd, cosine, 8),
      {{1, 0}, {2, 0}, {2, 0}, {1.5 + half / 2, 0}, {1.5, 0}, {1.5 - half / 2, 0}, {1, 0}, {1, 0}});
  SGD other(one_parameter(), SGDOptions(2));
  LambdaLR line(other, warmup_linear({.warmup = 1, .steps = 5}));
  expect_seen(seen(other, line, 6),
              {{2, 0}, {2, 0}, {2 * 2 / 3.0, 0}, {2 / 3.0, 0}, {0, 0}, {0, 0}});
  SGD third(one_parameter(), SGDOptions(2));
  LambdaLR constant(third, warmup_constant(4));
  expect_seen(seen(third, constant, 6), {{0.5, 0}, {1, 0}, {1.5, 0}, {2, 0}, {2, 0}, {2, 0}});
}

TEST(LambdaLR, EachParamGroupHasItsOwnInitialRate) {
  SGD sgd({torch::optim::OptimizerParamGroup(one_parameter(), std::make_unique<SGDOptions>(1.0))},
          SGDOptions(1));
  LambdaLR schedule(sgd, [](int64_t step) { return 1.0 / static_cast<double>(step + 1); });
  schedule.step();
  sgd.add_param_group({one_parameter(), std::make_unique<SGDOptions>(30.0)});
  schedule.step();
  EXPECT_DOUBLE_EQ(rate(sgd, 0), 1 / 3.0);
  EXPECT_DOUBLE_EQ(rate(sgd, 1), 10);
}

// A run that is interrupted after 3 of 6 steps has the rates and the values of one that is not.
TEST(LambdaLR, GoesOnAfterACheckpointAtAnotherNumberOfRanks) {
  const ScratchDirectory scratch;
  struct Job {
    explicit Job(uint64_t seed)
        : net(seeded(seed, [] { return std::make_shared<Mlp>(); })),
          sharded(fully_shard(net)),
          adamw(net->parameters(), AdamWOptions(0.01)),
          optimizer(sharded, adamw),
          schedule(adamw, warmup_cosine({.warmup = 2, .steps = 6})),
          cycle(adamw, {.steps = 6}) {}
    void train(int first, int last) {
      for (int step = first; step < last; ++step) {
        const Batch batch = global_batch(step, 12, 37, 5);
        optimizer.zero_grad();
        torch::mse_loss(net->forward(batch.x), batch.y).backward();
        optimizer.step();
        cycle.step();
        schedule.step();  // sets the rate; the one above the momentum
        rates.push_back(rate(adamw));
      }
    }
    std::shared_ptr<Mlp> net;
    Sharded<Mlp> sharded;
    AdamW adamw;
    ShardedOptimizer optimizer;
    LambdaLR schedule;
    OneCycleLR cycle;
    std::vector<double> rates;
  };
  std::vector<double> rates;
  std::vector<NamedTensor> state;
  run_world(2, [&](World& world) {
    Job job(1);
    job.train(0, 3);
    save_checkpoint(scratch / "three", job.sharded, &job.optimizer,
                    {.schedulers = {&job.schedule, &job.cycle}});
    job.rates.clear();
    job.train(3, 6);
    const auto all = job.sharded.full_state();
    if (world.rank() == 0) rates = job.rates, state = all;
  });
  run_world(2, [&](World&) {
    Job job(2);
    load_checkpoint(scratch / "three", job.sharded, &job.optimizer,
                    {.schedulers = {&job.schedule, &job.cycle}});
    job.train(3, 6);
    EXPECT_EQ(job.rates, rates);
    expect_same_state(job.sharded.full_state(), state, 0, "resumed");
  });
}

TEST(LambdaLR, WrongOptionsAreRefused) {
  SGD sgd(one_parameter(), SGDOptions(1));
  EXPECT_EQ(error_of([&] { warmup_cosine({.warmup = -1, .steps = 5}); }),
            "[LambdaLR] warmup must be 0 or more, and steps positive; got -1 and 5");
  EXPECT_EQ(error_of([&] { warmup_linear({.warmup = 5}); }),
            "[LambdaLR] warmup must be 0 or more, and steps positive; got 5 and 0");
  EXPECT_EQ(error_of([&] { LambdaLR schedule(sgd, nullptr); }),
            "[LambdaLR] factor must be a function; got none");
  EXPECT_EQ(error_of([&] { OneCycleLR schedule(sgd, {}); }),
            "[OneCycleLR] options.steps must be positive; got 0");
  EXPECT_NE(error_of([&] {
              torch::optim::Adagrad adagrad(one_parameter());
              OneCycleLR schedule(adagrad, {.steps = 5});
            }).find("no momentum to cycle"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              OneCycleLR schedule(sgd, {.steps = 5, .warmup_fraction = 0.6, .three_phases = true});
            }).find("must be 0 to 0.5; got 0.6"),
            std::string::npos);
}

}  // namespace lr_schedule_test
}  // namespace tessera::testing
