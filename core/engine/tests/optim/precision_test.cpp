// Parameters in half precision: master weights, the dtype of reductions, buffers, autocast.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "engine/model/sharded_state.h"
#include "support/autocast.h"
#include "support/counted_job.h"

namespace tessera::testing::precision_test {

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;
constexpr int kSteps = 3;

template <class Optimizer = torch::optim::AdamW, class Options = torch::optim::AdamWOptions>
TrainingRun run_in(at::ScalarType dtype, const Options& options = Options(1e-2)) {
  TrainingRun run = in_dtype(run_by<Mlp, Optimizer>(options), dtype);
  run.steps = kSteps;
  return run;
}

TrainingRun sgd_in(at::ScalarType dtype) {
  return run_in<torch::optim::SGD>(dtype, torch::optim::SGDOptions(0.1));
}

std::shared_ptr<Mlp> make_net(at::ScalarType dtype = at::kFloat) {
  return std::static_pointer_cast<Mlp>(run_in(dtype).make_net());
}

// The mean over ranks of gradients in the model's dtype, sent in `reduce_dtype` if given; in float.
std::vector<torch::Tensor> mean_gradients(Mlp& net, int step, int ranks,
                                          std::optional<at::ScalarType> reduce_dtype = {}) {
  const auto params = net.parameters();
  std::vector<torch::Tensor> means(params.size());
  for (int rank = 0; rank < ranks; ++rank) {
    net.zero_grad();
    rank_loss(net, global_batch(step, kRows, kWidth, kOut), rank, ranks, step).backward();
    for (size_t i = 0; i < params.size(); ++i) {
      const auto grad = params[i].grad().to(reduce_dtype.value_or(net.dtype())).to(torch::kFloat);
      means[i] = means[i].defined() ? means[i] + grad : grad.clone();
    }
  }
  for (auto& mean : means) mean = mean / ranks;
  return means;
}

// One process with float masters: gradients of each rank's rows in half precision, summed in float.
template <class Optimizer = torch::optim::AdamW, class Options = torch::optim::AdamWOptions>
State train_alone(Mlp& net, const std::vector<torch::Tensor>& start, int ranks,
                  std::optional<at::ScalarType> reduce_dtype = {}) {
  std::vector<torch::Tensor> masters;
  for (const auto& value : start) masters.push_back(value.clone().requires_grad_());
  Optimizer optimizer(masters, Options(1e-2));
  const auto params = net.parameters();
  for (int step = 0; step < kSteps; ++step) {
    const auto grads = mean_gradients(net, step, ranks, reduce_dtype);
    for (size_t i = 0; i < params.size(); ++i) masters[i].mutable_grad() = grads[i];
    optimizer.step();
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(masters[i]);
  }
  return plain_state(net);
}

// The backend of a device adds up in the dtype of the message, and so rounds the sum at each rank.
double tolerance_of_half_sums(int ranks) { return tests_on_host() || ranks == 1 ? 0 : 2e-2; }

std::vector<torch::Tensor> float_values(const Mlp& net) {
  std::vector<torch::Tensor> values;
  for (const auto& param : net.parameters()) values.push_back(param.detach().to(torch::kFloat));
  return values;
}

TEST(Precision, HalfModelsWithFloatMastersTrainAsOneProcessThatHasThem) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const int ranks : {1, 2, 3, 4}) {
      const auto alone = make_net(dtype);
      const State expected = train_alone(*alone, float_values(*alone), ranks);
      // With 3 ranks the mean is rounded differently (times 1/3), which half precision may show.
      expect_each_has(expected, run_in(dtype), ranks,
                      cases_of(with_each_partition(
                                   {.unit_bytes = 3000, .precision = {.master_dtype = at::kFloat}}),
                               ranks == 3 ? 2e-2 : tolerance_of_half_sums(ranks)));
    }
  }
}

// Its constructor makes them, in the dtype of the model.
TEST(Precision, SumsOfAdagradAreKeptInTheDtypeOfTheMasters) {
  using torch::optim::Adagrad, torch::optim::AdagradOptions;
  const auto alone = make_net(at::kBFloat16);
  const State expected = train_alone<Adagrad, AdagradOptions>(*alone, float_values(*alone), 2);
  expect_each_has(expected, run_in<Adagrad>(at::kBFloat16, AdagradOptions(1e-2)), 2,
                  cases_of(with_each_partition({.precision = {.master_dtype = at::kFloat}}),
                           tolerance_of_half_sums(2)));
}

TEST(Precision, AFloatModelIsUsedInHalfPrecisionAndKeepsItsValuesAsMasters) {
  for (const int ranks : {1, 2, 4}) {
    const auto start = float_values(*make_net());
    const auto alone = make_net(at::kBFloat16);
    const State expected = train_alone(*alone, start, ranks);
    on_worlds({ranks},
              at_each_level({.unit_bytes = 3000, .precision = {.param_dtype = at::kBFloat16}}),
              [&](World& world, const ShardPlan& plan) {
                ShardedJob<Mlp> job(run_in(at::kFloat), world, plan);
                job.train(0, kSteps);
                EXPECT_EQ(job.net->head->weight.scalar_type(), at::kBFloat16);
                expect_same_state(job.state(), expected, tolerance_of_half_sums(ranks), "bfloat16");
              });
  }
}

TEST(Precision, GradientsAreSentInTheReduceDtypeAndSummedInFloat) {
  // A float model whose gradients travel in bfloat16, and a bfloat16 one whose travel in float.
  for (const auto& [dtype, reduce] :
       {std::pair(at::kFloat, at::kBFloat16), std::pair(at::kBFloat16, at::kFloat)}) {
    const auto alone = make_net(dtype);
    const State expected = train_alone(*alone, float_values(*alone), 2, reduce);
    const ShardPlan wanted{.unit_bytes = 3000,
                           .precision = {.master_dtype = at::kFloat, .reduce_dtype = reduce}};
    on_worlds({2}, at_each_level(wanted),
              [&, dtype = dtype, reduce = reduce](World& world, const ShardPlan& plan) {
                CountedJob job(run_in(dtype), world, plan);
                job.train(0, kSteps);
                const int64_t sent = job.shard->counts().reduce_scatter.bytes_sent;
                const double tolerance = reduce == at::kFloat ? 0 : tolerance_of_half_sums(2);
                expect_same_state(job.state(), expected, tolerance, "sent in another dtype");
                int64_t numel = 0;
                for (int64_t i = 0; i < job.units(); ++i) numel += job.unit(i).numel();
                // At kNone the sums, in float, are gathered by the reduction.
                const bool gathers = plan.level == ShardLevel::kNone && tests_on_host();
                const auto item =
                    static_cast<int64_t>(c10::elementSize(reduce)) + (gathers ? 4 : 0);
                EXPECT_EQ(sent, kSteps * numel / 2 * item);
              });
  }
}

TEST(Precision, WithoutMastersTheOptimizerUpdatesHalfPrecisionAsInOneProcess) {
  for (const int ranks : {1, 2, 4}) {
    const auto alone = make_net(at::kBFloat16);
    torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < kSteps; ++step) {
      auto grads = mean_gradients(*alone, step, ranks);
      const auto params = alone->parameters();
      for (size_t i = 0; i < params.size(); ++i)
        params[i].mutable_grad() = grads[i].to(at::kBFloat16);
      plain.step();
    }
    on_worlds({ranks}, at_each_level({.unit_bytes = 0}), [&](World& world, const ShardPlan& plan) {
      ShardedJob job(sgd_in(at::kBFloat16), world, plan);
      job.train(0, kSteps);
      EXPECT_EQ(job.optimizer.memory().master_weights, 0);
      for (const auto& param : job.inner->param_groups()[0].params())
        EXPECT_EQ(param.scalar_type(), at::kBFloat16);
      expect_same_state(job.state(), plain_state(*alone), 0, "without masters");
    });
  }
}

TEST(Precision, MemoryIsThatOfTheFormulas) {
  run_world(2, [](World& world) {
    ShardedJob job(run_in(at::kBFloat16), world,
                   {.unit_bytes = 3000, .precision = {.master_dtype = at::kFloat}});
    job.backward(0);
    job.optimizer.step();
    int64_t shard = 0, own = 0;
    for (const auto& unit : job.sharded.state()->units()) {
      shard += unit->layout().shard_numel(world.rank());
      for (const ParamSlot& slot : unit->layout().slots) {
        own += std::max<int64_t>(0, std::min(slot.offset + slot.numel, unit->updated_end()) -
                                        std::max(slot.offset, unit->updated_begin()));
      }
    }
    const ShardMemory memory = job.optimizer.memory();
    EXPECT_EQ(memory.parameters, 2 * shard);
    EXPECT_EQ(memory.master_weights, 4 * shard);
    EXPECT_EQ(memory.gradients, 4 * shard);
    EXPECT_EQ(memory.optimizer_state, 8 * own);
    EXPECT_EQ(memory.offloaded, 0);
  });
}

TEST(Precision, FrozenHalfParametersHaveNoMasters) {
  run_world(2, [](World&) {
    const auto net = make_net(at::kHalf);
    for (auto& param : net->parameters()) param.requires_grad_(false);
    net->head->weight.requires_grad_(true);
    auto sharded = fully_shard(net, {.precision = {.master_dtype = at::kFloat}});
    for (const auto& unit : sharded.state()->units())
      EXPECT_EQ(unit->master().exists(), unit->layout().slots[0].requires_grad);
  });
}

// A layer of ones that is frozen at the wrap. The steps that it is trained in later are too small
// for bfloat16, in which a number below 1 is 0.004 below it.
TEST(Precision, FrozenHalfParametersGetMastersWhenTheyThaw) {
  const auto thaw = [](const ShardPlan& plan, bool is_known) {
    const auto net = on_test_device(std::make_shared<torch::nn::LinearImpl>(7, 5));
    net->to(at::kBFloat16);
    torch::nn::init::ones_(net->weight);
    net->weight.requires_grad_(false);
    torch::optim::SGD inner({net->bias}, torch::optim::SGDOptions(1e-3));
    if (is_known) inner.param_groups()[0].params().push_back(net->weight);
    auto sharded = fully_shard(net, plan);
    ShardedOptimizer optimizer(sharded, inner);
    const auto train = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        (net->weight.sum() + net->bias.sum()).backward();
        optimizer.step();
      }
    };
    train(2);
    EXPECT_TRUE(sharded.full_state()[0].tensor.eq(1).all().item<bool>());
    net->weight.requires_grad_(true);
    if (!is_known)
      optimizer.inner().add_param_group(torch::optim::OptimizerParamGroup({net->weight}));
    train(30);
    const auto weight = sharded.full_state()[0].tensor.to(at::kFloat);
    EXPECT_NEAR(weight.min().item<float>(), 0.97, 0.003);
    EXPECT_NEAR(weight.max().item<float>(), 0.97, 0.003);
    for (const auto& unit : sharded.state()->units())
      EXPECT_EQ(unit->layout().master_dtype, at::kFloat);
  };
  const auto thaw_everywhere = [&](World&) {
    for (const auto offload : {Offload::kNone, Offload::kHost}) {
      for (const ShardLevel level : kAllLevels) {
        for (const bool is_known : {true, false}) {
          thaw({.level = level, .precision = {.master_dtype = at::kFloat}, .offload = offload},
               is_known);
        }
      }
    }
  };
  for (const auto transport : kTransports) run_over(transport, 3, thaw_everywhere);
}

// A float layer with an update of low rank, as in LoRA.
struct LowRank : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(x, weight) + torch::linear(torch::linear(x, a), b);
  }
  torch::Tensor weight = register_parameter("weight", torch::randn({37, 41}), false);
  torch::Tensor a = register_parameter("a", torch::randn({3, 41}));
  torch::Tensor b = register_parameter("b", torch::randn({37, 3}));
};

std::shared_ptr<LowRank> make_low_rank() {
  return on_test_device(seeded(5, [] { return std::make_shared<LowRank>(); }));
}

ShardMemory bytes_of_low_rank(ShardLevel level, const Precision& precision, Offload offload) {
  return fully_shard(make_low_rank(), {.level = level, .precision = precision, .offload = offload})
      .memory();
}

TEST(Precision, RoundedFrozenParametersKeepTwoBytesAnElement) {
  const Precision rounds{.param_dtype = at::kBFloat16, .round_frozen = true};
  const Precision exact{.param_dtype = at::kBFloat16};
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      for (const ShardLevel level : {ShardLevel::kParameters, ShardLevel::kOptimizerState}) {
        int64_t frozen = 0, trained = 0, whole = 0, shards = 0;  // elements that this rank has
        const auto sharded = fully_shard(make_low_rank(), {.level = level, .precision = rounds});
        for (const auto& unit : sharded.state()->units()) {
          const UnitLayout& layout = unit->layout();
          const bool is_frozen = layout.slots[0].name() == "weight";
          (is_frozen ? frozen : trained) += layout.shard_numel(world.rank());
          EXPECT_EQ(unit->master().exists(), !is_frozen);
          whole += layout.numel();
          shards += layout.shard_numel(world.rank());
        }
        const bool frees = level == ShardLevel::kParameters && ranks > 1;
        const ShardMemory memory = bytes_of_low_rank(level, rounds, Offload::kNone);
        EXPECT_EQ(memory.parameters, 2 * (frees ? shards : whole));
        EXPECT_EQ(memory.master_weights, 4 * trained);
        const ShardMemory before = bytes_of_low_rank(level, exact, Offload::kNone);
        EXPECT_EQ(before.master_weights, 4 * (trained + frozen));
        const ShardMemory offloaded = bytes_of_low_rank(level, rounds, Offload::kHost);
        EXPECT_EQ(offloaded.parameters, frees ? 0 : 2 * whole);
        EXPECT_EQ(offloaded.master_weights, 0);
        EXPECT_EQ(offloaded.offloaded, 2 * frozen + 4 * trained);
      }
    });
  }
}

// The gradient is exact, and the steps are too small for bfloat16.
TEST(Precision, MastersOfRoundedFrozenParametersStartFromTheRoundedValues) {
  const auto thaw = [](const ShardPlan& plan) {
    const auto net = make_low_rank();
    const auto rounded = net->weight.detach().to(at::kBFloat16).clone();
    torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.0009765625));
    auto sharded = fully_shard(net, plan);
    ShardedOptimizer optimizer(sharded, inner);
    const auto train = [&] {
      optimizer.zero_grad();
      (net->weight.sum() + net->a.sum() + net->b.sum()).backward();
      optimizer.step();
    };
    train();
    EXPECT_TRUE(net->weight.equal(rounded));
    net->weight.requires_grad_(true);
    auto masters = rounded.to(at::kFloat);
    for (int step = 0; step < 5; ++step, masters.sub_(0.0009765625)) train();
    EXPECT_TRUE(net->weight.equal(masters.to(at::kBFloat16)));
    EXPECT_FALSE(net->weight.equal(rounded));
    const int64_t all = sharded.memory().master_weights + sharded.memory().offloaded;
    if (plan.offload == Offload::kNone) {
      int64_t updated = 0;
      for (const auto& unit : sharded.state()->units()) updated += unit->updated().numel();
      EXPECT_EQ(all, 4 * updated);
    }
  };
  for (const auto transport : kTransports) {
    run_over(transport, 3, [&](World&) {
      for (const auto offload : {Offload::kNone, Offload::kHost})
        for (const ShardLevel level : kAllLevels)
          thaw({.level = level,
                .precision = {.param_dtype = at::kBFloat16, .round_frozen = true},
                .offload = offload});
    });
  }
}

TEST(Precision, WritesByOperatorsReachTheMasters) {
  for (const ShardLevel level : kAllLevels) {
    run_world(3, [&](World&) {
      const auto net = make_net(at::kBFloat16);
      auto sharded = fully_shard(net, {.level = level, .precision = {.master_dtype = at::kFloat}});
      {
        torch::NoGradGuard no_grad;
        net->head->weight.fill_(0.75);
      }
      torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.5));
      ShardedOptimizer optimizer(sharded, inner);
      net->head->weight.sum().backward();  // a gradient of 1 everywhere
      optimizer.step();
      EXPECT_TRUE(net->head->weight.equal(torch::full_like(net->head->weight, 0.25)));
    });
  }
}

TEST(Precision, BuffersAndInputsAreConverted) {
  struct Normed : torch::nn::Module {
    torch::Tensor forward(torch::Tensor x, int64_t times, torch::Tensor index) {
      EXPECT_EQ(x.scalar_type(), at::kBFloat16);
      EXPECT_EQ(index.scalar_type(), at::kLong);
      return norm(fc(x)) * times;
    }
    torch::nn::Linear fc = register_module("fc", torch::nn::Linear(4, 4));
    torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
  };
  run_world(2, [](World&) {
    const auto net = on_test_device(std::make_shared<Normed>());
    auto sharded = fully_shard(
        net, {.precision = {.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}});
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), at::kLong);
    const auto out = sharded.forward(torch::ones({3, 4}, test_device()), 2, torch::arange(3));
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  });
}

// Takes its input by reference and changes it.
struct ByReference : torch::nn::Module {
  torch::Tensor forward(torch::Tensor& x) {
    x = x + 1;
    return fc(x);
  }
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(4, 4));
};

TEST(Precision, InputsThatAModelTakesByReferenceAreLeftAloneOrRefused) {
  run_world(1, [](World&) {
    const auto make = [] { return on_test_device(std::make_shared<ByReference>()); };
    auto plain = fully_shard(make());
    torch::Tensor x = torch::zeros({2, 4}, test_device());
    plain.forward(x);
    EXPECT_EQ(x.sum().item<float>(), 8);
    auto half = fully_shard(make(), {.precision = {.param_dtype = at::kBFloat16}});
    expect_error([&] { half.forward(x); }, {"takes a tensor by reference", "cast_inputs"});
    auto own =
        fully_shard(make(), {.precision = {.param_dtype = at::kBFloat16, .cast_inputs = false}});
    torch::Tensor y = x.to(at::kBFloat16);
    EXPECT_EQ(own.forward(y).scalar_type(), at::kBFloat16);
  });
}

TEST(Precision, DtypesThatCannotWorkAreRefused) {
  run_world(2, [](World&) {
    const auto refuse = [](Precision precision, const std::string& part) {
      expect_error([&] { fully_shard(make_net(), {.precision = precision}); }, {part});
    };
    refuse({.param_dtype = at::kLong}, "param_dtype must be a floating dtype; got Long");
    refuse({.reduce_dtype = at::kInt},
           "reduce_dtype must be a floating dtype, or kChar (int8); got Int");
    refuse({.round_frozen = true}, "round_frozen needs param_dtype");
    refuse({.reduce_dtype = at::kDouble}, "can't sum tensors of dtype Double into Float");
    for (const auto own : {at::kDouble, at::kHalf}) {
      const auto net = make_net(own);
      expect_error([&] { fully_shard(net, {.precision = {.param_dtype = at::kBFloat16}}); },
                   {fmt::format("can't sum tensors of dtype BFloat16 into {}", toString(own)),
                    "; parameter '" + net->named_parameters()[0].key() + "'"});
    }
  });
}

void train_autocast(Net& net, const std::function<void()>& zero_grad,
                    const std::function<void()>& step, int rank, int ranks, int passes) {
  const Autocast autocast(at::kBFloat16);
  for (int i = 0; i < kSteps; ++i) {
    zero_grad();
    const Batch batch = global_batch(i, kRows, kWidth, kOut);
    for (int pass = 0; pass < passes; ++pass) {
      const auto out = net.forward(rows_of(batch.x, rank + pass, ranks));
      EXPECT_EQ(out.scalar_type(), at::kBFloat16);
      (torch::mse_loss(out.to(torch::kFloat), rows_of(batch.y, rank + pass, ranks)) / passes)
          .backward();
      at::autocast::clear_cache();
    }
    step();
  }
}

TEST(Precision, AutocastModelsTrainAsInOneProcess) {
  for (const int ranks : {1, 2}) {
    const auto alone = make_net();
    torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1));
    train_autocast(
        *alone, [&] { plain.zero_grad(); }, [&] { plain.step(); }, 0, ranks, ranks);
    const auto expected = plain_state(*alone);
    on_worlds({ranks}, at_each_level({.unit_bytes = 3000}),
              [&](World& world, const ShardPlan& plan) {
                ShardedJob job(sgd_in(at::kFloat), world, plan);
                train_autocast(
                    *job.net, [&] { job.optimizer.zero_grad(); }, [&] { job.optimizer.step(); },
                    world.rank(), ranks, 1);
                expect_same_state(job.state(), expected, ranks == 1 ? 0 : 2e-6, "autocast");
              });
  }
}

// Autocast has converted weights from before the step; reusing them would be a silent error.
TEST(Precision, AutocastDoesNotGoOnWithWeightsOfBeforeTheStep) {
  run_world(1, [](World& world) {
    ShardedJob job(sgd_in(at::kFloat), world);
    const Autocast autocast(at::kBFloat16);
    const auto x = torch::ones({2, kWidth}, test_device());
    const auto before = job.net->forward(x);
    before.to(torch::kFloat).sum().backward();
    job.optimizer.step();
    EXPECT_FALSE(job.net->forward(x).equal(before));
  });
}

}  // namespace tessera::testing::precision_test
