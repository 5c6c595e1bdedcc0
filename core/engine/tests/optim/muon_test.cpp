// Muon: its formula, and on shards the bits of one process.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/engine/muon.h>
#include <tessera/tensor/dist_tensor.h>

#include <algorithm>
#include <cmath>

#include "support/models.h"

namespace tessera::testing::muon_test {

using torch::Tensor;

const std::vector<std::string> kExceptions{"head*", "table"};

// Matrices of which some are wider than high, a stack of matrices, vectors, a table of rows.
struct Experts : Net {
  Experts() {
    up = register_module("up", torch::nn::Linear(37, 52));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(52, 37).bias(false)));
    experts = register_parameter("experts", torch::randn({5, 37, 16}) * 0.1);
    table = register_parameter("table", torch::randn({21, 37}) * 0.1);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({37})));
    head = register_module("head", torch::nn::Linear(37, 5));
  }
  Tensor forward(Tensor x) override {
    x = x + down(torch::tanh(up(x)));
    const Tensor mixed = torch::einsum("bi,eij,ekj->bk", {x, experts, experts}) / 5;
    return head(norm(x + mixed) + table.mean(0));
  }
  torch::Dtype dtype() const override { return head->weight.scalar_type(); }
  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  Tensor experts, table;
  torch::nn::LayerNorm norm{nullptr};
};

TrainingRun muon_run() {
  return {.make_net = [] { return seeded(7, [] { return std::make_shared<Experts>(); }); },
          .make_optimizer =
              [](Net& net) {
                return std::make_unique<Muon>(muon_groups(
                    net, kExceptions, MuonOptions(0.02).weight_decay(0.01), MuonOptions(3e-3)));
              },
          .steps = 3};
}

std::vector<CutRule> rules() {
  auto cuts = muon_cuts(Experts(), kExceptions);
  cuts.push_back({"table", Cut::kRows, 2});
  cuts.push_back({"*bias", Cut::kElements, 8});
  return cuts;
}

std::vector<ParityCase> cases(int64_t unit_bytes) {
  std::vector<ShardPlan> plans = with_each_partition({.unit_bytes = unit_bytes});
  for (ShardPlan& plan : plans)
    if (plan.partition == Partition::kFlatEven) plan.cuts = rules();
  return cases_of(plans, /*tolerance=*/0);
}

class ShardedMuon : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(Over, ShardedMuon, ::testing::ValuesIn(kTransports), transport_of_test);

TEST_P(ShardedMuon, GivesTheBitsOfOneProcessAtEveryLevel) {
  for (const int ranks : {1, 2, 4}) {
    const State expected = train_alone(muon_run(), ranks);
    for (const int64_t unit_bytes : {0, 9000, 1 << 24})
      expect_each_has(expected, muon_run(), ranks, cases(unit_bytes), GetParam());
  }
}

TEST_P(ShardedMuon, GivesTheBitsOfOneProcessWithMastersAndOffload) {
  for (const int ranks : {1, 2, 4}) {
    std::vector<ParityCase> all;
    for (ParityCase each : cases(9000)) {
      each.plan.offload = Offload::kHost;
      if (!tests_on_host()) each.tolerance = 1e-2;  // products are rounded to bfloat16
      all.push_back(each);
    }
    expect_parity_of_each(muon_run(), ranks, all, GetParam());
  }
}

Tensor expected_direction(const Tensor& update) {
  Tensor x = update.to(torch::kBFloat16);
  if (update.size(0) > update.size(1)) x = x.t();
  x = x / x.norm().clamp_min(1e-7);
  for (int i = 0; i < 5; ++i) {
    const Tensor gram = x.mm(x.t());
    x = torch::addmm(x, torch::addmm(gram, gram, gram, -4.7750, 2.0315), x, 3.4445);
  }
  return update.size(0) > update.size(1) ? x.t() : x;
}

TEST(Muon, StepsByTheFormula) {
  for (const bool matches_rms : {false, true}) {
    for (const bool nesterov : {false, true}) {
      torch::manual_seed(3);
      std::vector<Tensor> params{torch::randn({8, 20}), torch::randn({20, 8}),
                                 torch::randn({3, 6, 4})};
      std::vector<Tensor> values, buffers;
      for (Tensor& param : params) {
        values.push_back(param.clone());
        buffers.push_back(torch::zeros_like(param));
        param.requires_grad_();
      }
      Muon optimizer(params, MuonOptions(0.1).nesterov(nesterov).match_rms_adamw(matches_rms));
      for (int step = 0; step < 3; ++step) {
        for (size_t i = 0; i < params.size(); ++i) {
          const Tensor grad = torch::randn(params[i].sizes());
          params[i].mutable_grad() = grad;
          buffers[i].lerp_(grad, 0.05);
          const Tensor update = nesterov ? grad.lerp(buffers[i], 0.95) : buffers[i];
          const bool stacked = update.dim() == 3;
          for (int64_t k = 0; k < (stacked ? update.size(0) : 1); ++k) {
            Tensor value = stacked ? values[i][k] : values[i];
            const auto m = static_cast<double>(value.size(0)),
                       n = static_cast<double>(value.size(1));
            const double rate =
                matches_rms ? 0.2 * std::sqrt(std::max(m, n)) : std::sqrt(std::max(1.0, m / n));
            value.mul_(1 - 0.1 * 0.1);
            value.sub_(0.1 * rate *
                       expected_direction(stacked ? update[k] : update).to(torch::kFloat));
          }
        }
        optimizer.step();
        for (size_t i = 0; i < params.size(); ++i)
          EXPECT_TRUE(torch::allclose(params[i], values[i], 1e-6, 1e-6)) << i;
      }
    }
  }
}

// Singular values of the direction are near 1, so that its norm is near sqrt(min(m, n)).
TEST(Muon, MakesDirectionsNearlyOrthogonal) {
  torch::manual_seed(5);
  Tensor param = torch::zeros({64, 96}).requires_grad_();
  Muon optimizer({param}, MuonOptions(1.0).weight_decay(0));
  param.mutable_grad() = torch::randn({64, 96}) * 1e-3;
  optimizer.step();
  const Tensor values = torch::linalg_svdvals(param.detach(), std::nullopt);
  EXPECT_GT(values.min().item<double>(), 0.3);
  EXPECT_LT(values.max().item<double>(), 1.5);
}

TEST(Muon, RefusesWhatItCantStep) {
  const auto parameter = [](at::IntArrayRef sizes, torch::Dtype dtype = torch::kFloat) {
    return torch::ones(sizes, dtype).requires_grad_();
  };
  expect_error([&] { Muon({parameter({7})}); },
               {"Muon only supports 2D parameters", "[7]", "adamw"});
  expect_error([&] { Muon({parameter({2, 2, 2, 2})}); }, {"2D parameters", "[2, 2, 2, 2]"});
  expect_error([&] { Muon({parameter({2, 2}, torch::kComplexFloat)}); }, {"complex"});
  expect_error([&] { Muon({parameter({2, 2})}, MuonOptions(-1)); }, {"[Muon] lr", "-1"});
  expect_error(
      [&] {
        Muon({parameter({2, 2})}, MuonOptions().ns_steps(100));
      },
      {"ns_steps", "100"});
  expect_error(
      [&] {
        Muon({parameter({2, 2})}, MuonOptions().betas({1, 0}));
      },
      {"betas", "[0, 1)"});
  Muon({parameter({7})}, MuonOptions().adamw(true));
}

TEST(Muon, RefusesGradientsBeforeItChangesAnything) {
  Tensor matrix = torch::ones({3, 3}).requires_grad_();
  Tensor vector = torch::ones({3}, torch::kComplexFloat).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{matrix});
  groups.emplace_back(std::vector<Tensor>{vector},
                      std::make_unique<MuonOptions>(MuonOptions().adamw(true)));
  Muon optimizer(groups);
  matrix.mutable_grad() = torch::ones({3, 3});
  vector.mutable_grad() = torch::ones({3}, torch::kComplexFloat);
  expect_error([&] { optimizer.step(); }, {"[CPUAdam] parameters must be Float", "Complex"});
  EXPECT_TRUE(torch::equal(matrix, torch::ones({3, 3})));
  EXPECT_TRUE(optimizer.state().empty());
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world(world, {2});
    Tensor dist = distribute(torch::ones({4, 4}), mesh, {Shard(0)}).requires_grad_();
    Muon of_dist({dist});
    dist.mutable_grad() = torch::ones_like(dist);
    expect_error([&] { of_dist.step(); }, {"[Muon] a DistTensor can't be stepped"});
  });
}

// Each matrix that is cut is made orthogonal by one rank.
TEST_P(ShardedMuon, GivesTheBitsOfOneProcessOnMatricesThatAreCut) {
  std::vector<ShardPlan> plans;
  for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kOptimizerState,
                                 ShardLevel::kGradients, ShardLevel::kParameters}) {
    for (const auto& cuts : {std::vector<CutRule>{},
                             {{"*", Cut::kRows, 3}},
                             {{"experts", Cut::kElements, 7}, {"up*", Cut::kWhole}}})
      plans.push_back({.level = level, .unit_bytes = 9000, .cuts = cuts});
  }
  plans.push_back({.unit_bytes = 0, .offload = Offload::kHost});
  plans.push_back({.unit_bytes = 1 << 24, .bucket_bytes = 1 << 24});
  for (const int ranks : {1, 2, 4})
    expect_each_has(train_alone(muon_run(), ranks), muon_run(), ranks, cases_of(plans, 0),
                    GetParam());
}

// A matrix in another order of memory, and stacks whose matrices don't lie one after another.
TEST(MuonExchange, KeepsTheOrderOfMemory) {
  const auto train = [](const ShardPlan* plan) {
    const auto random = [generator = at::make_generator<at::CPUGeneratorImpl>(11)](
                            at::IntArrayRef sizes) { return torch::randn(sizes, generator); };
    std::vector<Tensor> params = {random({13, 6}).t(), random({5, 4, 3}).permute({2, 0, 1}),
                                  random({3, 5, 4}), random({0, 4})};
    for (Tensor& param : params) param.requires_grad_();
    Muon inner(params, MuonOptions(0.1));
    std::optional<ShardedModule> sharded;
    std::optional<ShardedOptimizer> optimizer;
    if (plan) {
      std::vector<NamedTensor> tensors;
      for (size_t i = 0; i < params.size(); ++i) tensors.push_back({std::to_string(i), params[i]});
      sharded.emplace(fully_shard(tensors, {}, *plan));
      optimizer.emplace(*sharded, inner);
    }
    for (int step = 0; step < 3; ++step) {
      plan ? optimizer->zero_grad() : inner.zero_grad();
      Tensor loss = torch::zeros({});
      for (const Tensor& param : params) {
        const Tensor weight = random(param.sizes());
        loss = loss + (param * param * weight).sum();
      }
      loss.backward();
      if (plan)
        optimizer->step();
      else
        inner.step();
    }
    std::vector<Tensor> values;
    for (const Tensor& param : params) values.push_back(param.detach().clone());
    return values;
  };
  const auto expected = train(nullptr);
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      for (const int64_t unit_bytes : {0, 1 << 20}) {
        const ShardPlan plan{.unit_bytes = unit_bytes, .process_group = world.process_group()};
        const auto values = train(&plan);
        for (size_t i = 0; i < values.size(); ++i)
          EXPECT_TRUE(torch::equal(values[i], expected[i])) << i;
      }
    });
  }
}

TEST(MuonExchange, SendsTheBytesOfTheFormula) {
  run_world(4, [](World& world) {
    const auto counted = counting_process_group(world.process_group());
    torch::nn::Linear layer(torch::nn::LinearOptions(64, 64).bias(false));
    auto sharded = fully_shard(layer, {.process_group = counted});
    Muon inner(layer->parameters());
    ShardedOptimizer optimizer(sharded, inner);
    layer(torch::ones({2, 64})).sum().backward();
    counted->reset_counts();
    optimizer.step();
    // The owner gets three quarters, and sends them back; the others send a quarter each.
    const int64_t quarter = 2 * 64 * 16;
    EXPECT_EQ(counted->counts().all_to_all.bytes_sent, world.rank() == 0 ? 3 * quarter : quarter);
    EXPECT_EQ(counted->counts().all_to_all.calls, 2);
  });
}

TEST(MuonExchange, RefusesPartsOfDistTensors) {
  run_world(4, [](World& world) {
    const auto mesh = DeviceMesh::over_world(world, {2, 2}, {"dp", "tp"});
    torch::nn::Linear layer(8, 8);
    distribute_(layer->weight, mesh.sub_mesh("tp"), {Shard{0}});
    auto sharded = fully_shard(layer, {.process_group = mesh.process_group(0)});
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>{layer->weight});
    Muon inner(groups);
    expect_error([&] { ShardedOptimizer(sharded, inner); }, {"'weight'", "DistTensor"});
  });
}

}  // namespace tessera::testing::muon_test
