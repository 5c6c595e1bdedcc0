// Parameters in half precision: master weights, the dtype of reductions, buffers, autocast.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "engine/model/sharded_state.h"
#include "support/autocast.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace precision_test {

using namespace testing;

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;
constexpr int kSteps = 3;

std::shared_ptr<Mlp> make_net(std::optional<at::ScalarType> dtype) {
  const auto net = seeded(7, [] { return std::make_shared<Mlp>(kWidth, 3, kOut); });
  if (dtype) net->to(*dtype);
  return net;
}

torch::Tensor loss_of(Mlp& net, int step, int rank, int size, at::ScalarType dtype) {
  const Batch batch = global_batch(step, kRows, kWidth, kOut);
  const auto out = net.forward(rows_of(batch.x, rank, size).to(dtype));
  return torch::mse_loss(out.to(torch::kFloat), rows_of(batch.y, rank, size));
}

// The mean over ranks of gradients in `dtype`, sent in `reduce_dtype` if given; in float.
std::vector<torch::Tensor> mean_gradients(Mlp& net, int step, int ranks, at::ScalarType dtype,
                                          std::optional<at::ScalarType> reduce_dtype = {}) {
  const auto params = net.parameters();
  std::vector<torch::Tensor> means(params.size());
  for (int rank = 0; rank < ranks; ++rank) {
    net.zero_grad();
    loss_of(net, step, rank, ranks, dtype).backward();
    for (size_t i = 0; i < params.size(); ++i) {
      const auto grad = params[i].grad().to(reduce_dtype.value_or(dtype)).to(torch::kFloat);
      means[i] = means[i].defined() ? means[i] + grad : grad.clone();
    }
  }
  for (auto& mean : means) mean = mean / ranks;
  return means;
}

// One process with float masters: gradients of each rank's rows in half precision, summed in float.
template <class Optimizer = torch::optim::AdamW, class Options = torch::optim::AdamWOptions>
std::vector<NamedTensor> train_alone(Mlp& net, const std::vector<torch::Tensor>& start, int ranks,
                                     at::ScalarType dtype,
                                     std::optional<at::ScalarType> reduce_dtype = {}) {
  std::vector<torch::Tensor> masters;
  for (const auto& value : start) masters.push_back(value.clone().requires_grad_());
  Optimizer optimizer(masters, Options(1e-2));
  const auto params = net.parameters();
  for (int step = 0; step < kSteps; ++step) {
    const auto grads = mean_gradients(net, step, ranks, dtype, reduce_dtype);
    for (size_t i = 0; i < params.size(); ++i) masters[i].mutable_grad() = grads[i];
    optimizer.step();
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(masters[i]);
  }
  return plain_state(net);
}

template <class Optimizer = torch::optim::AdamW, class Options = torch::optim::AdamWOptions>
std::vector<NamedTensor> train_sharded(World& world, const std::shared_ptr<Mlp>& net,
                                       ShardPlan plan, at::ScalarType dtype) {
  Optimizer inner(net->parameters(), Options(1e-2));
  auto sharded = fully_shard(net, plan);
  ShardedOptimizer optimizer(sharded, inner, {.fused = false});
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(*net, step, world.rank(), world.size(), dtype).backward();
    optimizer.step();
  }
  return sharded.full_state();
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
      const auto expected = train_alone(*alone, float_values(*alone), ranks, dtype);
      std::vector<ParityCase> cases;
      for (const ShardLevel level : kAllLevels) {
        for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
          cases.push_back({{.level = level,
                            .partition = partition,
                            .unit_bytes = 3000,
                            .precision = {.master_dtype = at::kFloat}},
                           fmt::format("{}, {} ranks, level {}, partition {}", c10::toString(dtype),
                                       ranks, int(level), int(partition))});
        }
      }
      // By case and rank.
      std::vector<std::vector<std::vector<NamedTensor>>> states(
          cases.size(), std::vector<std::vector<NamedTensor>>(ranks));
      run_world(ranks, [&](World& world) {
        for (size_t i = 0; i < cases.size(); ++i)
          states[i][world.rank()] = train_sharded(world, make_net(dtype), cases[i].plan, dtype);
      });
      for (size_t i = 0; i < cases.size(); ++i) {
        // With 3 ranks the mean is rounded differently (times 1/3), which half precision may show.
        const double tolerance = ranks == 3 ? 2e-2 : tolerance_of_half_sums(ranks);
        expect_same_state(states[i][0], expected, tolerance, cases[i].what);
        for (const auto& state : states[i])
          expect_same_state(state, states[i][0], 0, cases[i].what);
      }
    }
  }
}

// Its constructor makes them, in the dtype of the model.
TEST(Precision, SumsOfAdagradAreKeptInTheDtypeOfTheMasters) {
  using torch::optim::Adagrad, torch::optim::AdagradOptions;
  const auto alone = make_net(at::kBFloat16);
  const auto expected =
      train_alone<Adagrad, AdagradOptions>(*alone, float_values(*alone), 2, at::kBFloat16);
  for (const ShardLevel level : kAllLevels) {
    for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
      run_world(2, [&](World& world) {
        const auto state = train_sharded<Adagrad, AdagradOptions>(
            world, make_net(at::kBFloat16),
            {.level = level, .partition = partition, .precision = {.master_dtype = at::kFloat}},
            at::kBFloat16);
        expect_same_state(state, expected, tolerance_of_half_sums(2),
                          fmt::format("level {}, partition {}", int(level), int(partition)));
      });
    }
  }
}

TEST(Precision, AFloatModelIsUsedInHalfPrecisionAndKeepsItsValuesAsMasters) {
  for (const int ranks : {1, 2, 4}) {
    const auto start = float_values(*make_net({}));
    const auto alone = make_net(at::kBFloat16);
    const auto expected = train_alone(*alone, start, ranks, at::kBFloat16);
    run_world(ranks, [&](World& world) {
      for (const ShardLevel level : kAllLevels) {
        const ShardPlan plan{
            .level = level, .unit_bytes = 3000, .precision = {.param_dtype = at::kBFloat16}};
        const auto net = make_net({});
        const auto state = train_sharded(world, net, plan, at::kBFloat16);
        EXPECT_EQ(net->head->weight.scalar_type(), at::kBFloat16);
        expect_same_state(state, expected, tolerance_of_half_sums(ranks),
                          fmt::format("{} ranks, level {}", ranks, int(level)));
      }
    });
  }
}

TEST(Precision, GradientsAreSentInTheReduceDtypeAndSummedInFloat) {
  // A float model whose gradients travel in bfloat16, and a bfloat16 one whose travel in float.
  for (const auto& [dtype, reduce] :
       {std::pair(at::kFloat, at::kBFloat16), std::pair(at::kBFloat16, at::kFloat)}) {
    const auto alone = make_net(dtype);
    const auto expected = train_alone(*alone, float_values(*alone), 2, dtype, reduce);
    for (const ShardLevel level : kAllLevels) {
      run_world(2, [&, dtype = dtype, reduce = reduce](World& world) {
        const auto counter = counting_process_group(world.process_group());
        const ShardPlan plan{.level = level,
                             .unit_bytes = 3000,
                             .process_group = counter,
                             .precision = {.master_dtype = at::kFloat, .reduce_dtype = reduce}};
        const auto net = make_net(dtype);
        const auto state = train_sharded(world, net, plan, dtype);
        const double tolerance = reduce == at::kFloat ? 0 : tolerance_of_half_sums(2);
        expect_same_state(state, expected, tolerance, fmt::format("level {}", int(level)));
        int64_t numel = 0;
        const auto other = fully_shard(make_net(dtype), plan);
        for (const auto& unit : other.state()->units()) numel += unit->layout().numel();
        // At kNone the sums, in float, are gathered by the reduction.
        const bool gathers = level == ShardLevel::kNone && tests_on_host();
        const auto item = static_cast<int64_t>(c10::elementSize(reduce)) + (gathers ? 4 : 0);
        EXPECT_EQ(counter->counts().reduce_scatter.bytes_sent, kSteps * numel / 2 * item);
      });
    }
  }
}

TEST(Precision, WithoutMastersTheOptimizerUpdatesHalfPrecisionAsInOneProcess) {
  for (const int ranks : {1, 2, 4}) {
    const auto alone = make_net(at::kBFloat16);
    torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < kSteps; ++step) {
      auto grads = mean_gradients(*alone, step, ranks, at::kBFloat16);
      const auto params = alone->parameters();
      for (size_t i = 0; i < params.size(); ++i)
        params[i].mutable_grad() = grads[i].to(at::kBFloat16);
      plain.step();
    }
    run_world(ranks, [&](World& world) {
      for (const ShardLevel level : kAllLevels) {
        const auto net = make_net(at::kBFloat16);
        torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
        auto sharded = fully_shard(net, {.level = level, .unit_bytes = 0});
        ShardedOptimizer optimizer(sharded, inner, {.fused = false});
        for (int step = 0; step < kSteps; ++step) {
          optimizer.zero_grad();
          loss_of(*net, step, world.rank(), ranks, at::kBFloat16).backward();
          optimizer.step();
        }
        EXPECT_EQ(optimizer.memory().master_weights, 0);
        for (const auto& param : inner.param_groups()[0].params())
          EXPECT_EQ(param.scalar_type(), at::kBFloat16);
        expect_same_state(sharded.full_state(), plain_state(*alone), 0,
                          fmt::format("{} ranks, level {}", ranks, int(level)));
      }
    });
  }
}

TEST(Precision, MemoryIsThatOfTheFormulas) {
  run_world(2, [](World& world) {
    const auto net = make_net(at::kBFloat16);
    torch::optim::AdamW inner(net->parameters(), torch::optim::AdamWOptions(1e-3));
    auto sharded =
        fully_shard(net, {.unit_bytes = 3000, .precision = {.master_dtype = at::kFloat}});
    ShardedOptimizer optimizer(sharded, inner);
    loss_of(*net, 0, world.rank(), 2, at::kBFloat16).backward();
    optimizer.step();
    int64_t shard = 0, own = 0;
    for (const auto& unit : sharded.state()->units()) {
      shard += unit->layout().shard_numel(world.rank());
      for (const ParamSlot& slot : unit->layout().slots) {
        own += std::max<int64_t>(0, std::min(slot.offset + slot.numel, unit->updated_end()) -
                                        std::max(slot.offset, unit->updated_begin()));
      }
    }
    const ShardMemory memory = optimizer.memory();
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
  for (const auto transport : {Transport::kGloo, Transport::kArena})
    run_world(3, thaw_everywhere, std::chrono::seconds(30), transport);
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
      expect_error([&] { fully_shard(make_net({}), {.precision = precision}); }, {part});
    };
    refuse({.param_dtype = at::kLong}, "param_dtype must be a floating dtype; got Long");
    refuse({.reduce_dtype = at::kInt},
           "reduce_dtype must be a floating dtype, or kChar (int8); got Int");
    refuse({.reduce_dtype = at::kDouble}, "can't sum tensors of dtype Double into Float");
    for (const auto own : {at::kDouble, at::kHalf}) {
      const auto net = make_net({});
      net->to(own);
      expect_error([&] { fully_shard(net, {.precision = {.param_dtype = at::kBFloat16}}); },
                   {fmt::format("can't sum tensors of dtype BFloat16 into {}", toString(own))});
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
    const auto alone = make_net({});
    torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1));
    train_autocast(
        *alone, [&] { plain.zero_grad(); }, [&] { plain.step(); }, 0, ranks, ranks);
    const auto expected = plain_state(*alone);
    for (const ShardLevel level : kAllLevels) {
      run_world(ranks, [&](World& world) {
        const auto net = make_net({});
        torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
        auto sharded = fully_shard(net, {.level = level, .unit_bytes = 3000});
        ShardedOptimizer optimizer(sharded, inner, {.fused = false});
        train_autocast(
            *net, [&] { optimizer.zero_grad(); }, [&] { optimizer.step(); }, world.rank(), ranks,
            1);
        expect_same_state(sharded.full_state(), expected, ranks == 1 ? 0 : 2e-6,
                          fmt::format("{} ranks, level {}", ranks, int(level)));
      });
    }
  }
}

// Autocast has converted weights from before the step; reusing them would be a silent error.
TEST(Precision, AutocastDoesNotGoOnWithWeightsOfBeforeTheStep) {
  run_world(1, [](World&) {
    const auto net = make_net({});
    torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.5));
    auto sharded = fully_shard(net, {});
    ShardedOptimizer optimizer(sharded, inner);
    const Autocast autocast(at::kBFloat16);
    const auto x = torch::ones({2, kWidth}, test_device());
    const auto before = net->forward(x);
    before.to(torch::kFloat).sum().backward();
    optimizer.step();
    EXPECT_FALSE(net->forward(x).equal(before));
  });
}

}  // namespace precision_test
}  // namespace tessera
