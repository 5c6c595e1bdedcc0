// `shard_optimizer`, stages and scaler.

#include <cmath>

#include "dialects/paddle/tests/shard_layer.h"

namespace tessera::testing::shard_optimizer_test {

using paddle::shard_layer;
using paddle::shard_optimizer;
using paddle::ShardingStage1;
using paddle::ShardingStage2;
using paddle::ShardingStage3;

template <class Model>
at::Tensor loss_of(Model& model, int step, int64_t rows = 8) {
  return model(values({rows, 8}, 100 + step)).square().mean();
}

template <class Model, class Optimizer>
void train(Model& model, Optimizer& optimizer, int steps = 4) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(model, step).backward();
    optimizer.step();
  }
}

void expect_same(TwoLayers& model, TwoLayers& plain) {
  const auto expected = plain->named_parameters();
  for (const auto& item : model->named_parameters()) {
    SCOPED_TRACE(item.key());
    expect_values(item.value(), expected[item.key()], 1e-5);
  }
}

torch::optim::AdamW make_adamw(TwoLayers& model) {
  return torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(0.01));
}

TEST(ShardOptimizer, SL_50_AccumulatorsLieAsTheirParameters) {
  run_world(2, [](World&) {
    TwoLayers model, plain;
    shard_layer(model, ProcessMesh({0, 1}), columns_then_rows);
    auto inner = make_adamw(model), expected = make_adamw(plain);
    auto optimizer = shard_optimizer(inner);
    train(model, optimizer);
    train(plain, expected);
    expect_same(model, plain);
    const auto state = optimizer.state_dict();
    EXPECT_EQ(placements_of(state.at("fc1.weight.exp_avg")), Placements{Shard{0}});
    EXPECT_EQ(to_local(state.at("fc1.weight.exp_avg")).size(0), 5);
    EXPECT_EQ(placements_of(state.at("fc2.weight.exp_avg_sq")), Placements{Shard{1}});
    EXPECT_EQ(placements_of(state.at("fc1.weight.step")), Placements{Replicate{}});
    EXPECT_EQ(state.at("fc1.weight.step").sizes(), (std::vector<int64_t>{1}));
    expect_error([] { shard_optimizer(static_cast<torch::optim::Optimizer*>(nullptr)); },
                 {"cannot be empty"});
  });
}

TEST(ShardOptimizer, SL_50_OtherOptimizersWorkAsWell) {
  run_world(2, [](World&) {
    const auto expect_trains = [](auto make) {
      TwoLayers model, plain;
      shard_layer(model, ProcessMesh({0, 1}), columns_then_rows);
      auto inner = make(model->parameters());
      auto expected = make(plain->parameters());
      auto optimizer = shard_optimizer(inner.get());
      train(model, optimizer);
      train(plain, *expected);
      expect_same(model, plain);
    };
    using Params = std::vector<at::Tensor>;
    expect_trains([](Params p) {
      return std::make_unique<torch::optim::SGD>(
          p, torch::optim::SGDOptions(0.05).momentum(0.9).dampening(0.1));
    });
    // Adagrad makes its state in its constructor: after the model was sharded, or before.
    expect_trains([](Params p) { return std::make_unique<torch::optim::Adagrad>(p); });
    TwoLayers late, plain;
    torch::optim::Adagrad early(late->parameters()), expected(plain->parameters());
    shard_layer(late, ProcessMesh({0, 1}), columns_then_rows);
    auto optimizer = shard_optimizer(early);
    train(late, optimizer);
    train(plain, expected);
    expect_same(late, plain);
    EXPECT_EQ(placements_of(optimizer.state_dict().at("fc1.weight.sum")), Placements{Shard{0}});
  });
}

// An optimizer of the user's own.
struct SignOptimizer : torch::optim::Optimizer {
  struct Options : torch::optim::OptimizerCloneableOptions<Options> {
    double get_lr() const override { return 0.01; }
    void set_lr(double) override {}
  };
  explicit SignOptimizer(std::vector<at::Tensor> params)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(params))},
                  std::make_unique<Options>()) {}
  at::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    for (const auto& group : param_groups())
      for (const at::Tensor& param : group.params()) param.sub_(param.grad().sign(), 0.01);
    return {};
  }
};

TEST(ShardOptimizer, SL_50_AnOptimizerOfTheUsersOwnStepsAsWell) {
  run_world(2, [](World&) {
    TwoLayers model, plain;
    shard_layer(model, ProcessMesh({0, 1}), columns_then_rows);
    SignOptimizer inner(model->parameters()), expected(plain->parameters());
    auto optimizer = shard_optimizer(inner);
    train(model, optimizer);
    for (int step = 0; step < 4; ++step) {
      expected.zero_grad();
      loss_of(plain, step).backward();
      expected.step({});
    }
    expect_same(model, plain);
    EXPECT_EQ(optimizer.state_dict().size(), 1u);  // the learning rate: it keeps nothing else
  });
}

TEST(ShardOptimizer, SL_50_AnUnshardedLayerIsSteppedAsItIs) {
  run_world(2, [](World&) {
    TwoLayers model, plain;
    auto inner = make_adamw(model), expected = make_adamw(plain);
    auto optimizer = shard_optimizer(inner);
    train(model, optimizer);
    train(plain, expected);
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(item.value().equal(plain->named_parameters()[item.key()]));
  });
}

TEST(ShardOptimizer, SL_51_AFunctionPlacesAccumulators) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    TwoLayers model, plain;
    shard_layer(model, mesh);
    auto inner = make_adamw(model), expected = make_adamw(plain);
    std::set<std::string> names;
    auto optimizer = shard_optimizer(
        inner, [&](const std::string& name, const at::Tensor& param, const at::Tensor& state) {
          names.insert(name);
          EXPECT_EQ(param.sizes(), state.sizes());
          return redistribute(state, {Shard{0}});
        });
    EXPECT_EQ(names, (std::set<std::string>{"exp_avg", "exp_avg_sq"}));
    train(model, optimizer);
    train(plain, expected);
    expect_same(model, plain);
    EXPECT_EQ(placements_of(optimizer.state_dict().at("fc1.weight.exp_avg")), Placements{Shard{0}});
    EXPECT_EQ(placements_of(model->fc1->weight), Placements{Replicate{}});
    TwoLayers other;
    shard_layer(other, mesh);
    auto unplaced = make_adamw(other);
    expect_error(
        [&] {
          shard_optimizer(unplaced, [](const std::string&, const at::Tensor&,
                                       const at::Tensor& state) { return full_tensor(state); });
        },
        {"must return a DistTensor", "an ordinary tensor"});
  });
}

// Data-parallel over `dp`, tensor-parallel over `mp`.
template <class Stage>
void expect_stage_trains(const std::vector<int64_t>& shape, const Stage& stage) {
  const int ranks = static_cast<int>(shape[0] * shape[1]);
  run_world(ranks, [&](World&) {
    const auto mesh = DeviceMesh::over_world(shape, {"dp", "mp"});
    TwoLayers model, plain;
    auto layer = shard_layer(
        model, mesh,
        [](const std::string& name, nn::Module& module, const DeviceMesh& m) {
          auto* linear = module.as<nn::LinearImpl>();
          if (name == "fc1") {
            distribute_(linear->weight, m, {Replicate{}, Shard{0}});
            distribute_(linear->bias, m, {Replicate{}, Shard{0}});
          } else if (name == "fc2") {
            distribute_(linear->weight, m, {Replicate{}, Shard{1}});
          }
        },
        [](std::vector<at::Tensor> inputs, const DeviceMesh& m) {
          return paddle::shard_tensor(inputs[0], m, {Shard{0}});
        });
    auto inner = make_adamw(model), expected = make_adamw(plain);
    auto optimizer = shard_optimizer(inner, stage);
    train(layer, optimizer);
    train(plain, expected);
    expect_same(model, plain);
    EXPECT_EQ(placements_of(model->fc1->weight), (Placements{Replicate{}, Shard{0}}));
    // Accumulators are split over both mesh dims.
    int64_t held = 0;
    for (const auto& group : inner.param_groups())
      for (const at::Tensor& param : group.params()) held += param.numel();
    const int64_t numel = to_local(model->fc1->weight).numel() +
                          to_local(model->fc1->bias).numel() +
                          to_local(model->fc2->weight).numel() + to_local(model->fc2->bias).numel();
    const bool is_split = shape[0] > 1;
    EXPECT_EQ(is_split, held < numel);
  });
}

TEST(ShardOptimizer, SL_52_StagesTrainAsOneProcess) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{2, 2}, std::vector<int64_t>{3, 1}, std::vector<int64_t>{1, 2}}) {
    expect_stage_trains(shape, ShardingStage1("dp"));
    expect_stage_trains(shape, ShardingStage2(int64_t{0}));
    expect_stage_trains(shape, ShardingStage3());
  }
}

TEST(ShardOptimizer, SL_52_WhatAStageCanNotDoIsRefused) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1}, {"mp"});
    TwoLayers sharded, ordinary;
    shard_layer(sharded, mesh, columns_then_rows);
    auto inner = make_adamw(sharded), other = make_adamw(ordinary);
    expect_error([&] { shard_optimizer(inner, ShardingStage1()); },
                 {"along which all parameters are replicated"});
    expect_error([&] { shard_optimizer(inner, ShardingStage2("mp")); },
                 {"replicated along mesh dim 0"});
    expect_error([&] { shard_optimizer(inner, ShardingStage1("dp")); }, {"dp", "mp"});
    expect_error(
        [&] {
          shard_optimizer(inner, ShardingStage1(ProcessMesh({1, 0})));
        },
        {"the stage's mesh must be"});
    expect_error([&] { shard_optimizer(other, ShardingStage3()); }, {"DistTensors", "param 0"});
    EXPECT_EQ(inner.param_groups()[0].params().size(), 4u);  // as they were
    EXPECT_TRUE(inner.param_groups()[0].params()[0].is_same(sharded->fc1->weight));
  });
}

TEST(ShardOptimizer, SL_53_ParametersAreReplicatedAfterAStep) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1}, {"dp"});
    for (const paddle::ShardingStage& stage : {paddle::ShardingStage(ShardingStage1("dp")),
                                               paddle::ShardingStage(ShardingStage2("dp"))}) {
      TwoLayers model, plain;
      shard_layer(model, mesh);
      auto inner = make_adamw(model), expected = make_adamw(plain);
      auto optimizer = shard_optimizer(inner, stage);
      train(model, optimizer, 1);
      train(plain, expected, 1);
      for (const auto& item : model->named_parameters()) {
        EXPECT_EQ(placements_of(item.value()), Placements{Replicate{}});
        EXPECT_TRUE(torch::allclose(to_local(item.value()).clone(),
                                    plain->named_parameters()[item.key()], 1e-5, 1e-6));
      }
    }
  });
}

TEST(ShardOptimizer, SL_54_StateIsThereBeforeTheFirstStep) {
  run_world(2, [](World&) {
    TwoLayers model;
    shard_layer(model, ProcessMesh({0, 1}), columns_then_rows);
    auto inner = make_adamw(model);
    auto optimizer = shard_optimizer(inner);
    loss_of(model, 0).backward();
    expect_error([&] { optimizer.state_dict(); }, {"gradient should be None", "'fc1.weight'"});
    optimizer.zero_grad();
    const auto state = optimizer.state_dict();
    EXPECT_EQ(state.size(), 4 * 3 + 1u);
    EXPECT_TRUE(same_values(full_tensor(state.at("fc1.weight.exp_avg")), torch::zeros({10, 8})));
    EXPECT_EQ(state.at("LR_Scheduler")[0].item<double>(), 0.01);
  });
}

template <class Stage>
void expect_resumes(const Stage& stage, bool from_full) {
  run_world(2, [&](World&) {
    const auto mesh = DeviceMesh::over_world({2, 1}, {"dp", "mp"});
    TwoLayers model, plain;
    shard_layer(model, mesh);
    auto inner = make_adamw(model), expected = make_adamw(plain);
    auto optimizer = shard_optimizer(inner, stage);
    train(model, optimizer, 3);
    train(plain, expected, 3);
    auto state = optimizer.state_dict();
    if (from_full) {
      for (auto& [name, tensor] : state)
        if (is_dist(tensor)) tensor = full_tensor(tensor);
    }
    TwoLayers copy;
    {
      torch::NoGradGuard no_grad;
      for (const auto& item : copy->named_parameters())
        item.value().copy_(plain->named_parameters()[item.key()]);
    }
    shard_layer(copy, mesh);
    torch::optim::AdamW fresh(copy->parameters(), torch::optim::AdamWOptions(0.5));
    auto resumed = shard_optimizer(fresh, stage);
    resumed.load_state_dict(state);
    train(copy, resumed, 3);
    train(plain, expected, 3);
    expect_same(copy, plain);
    state.erase("fc1.bias.exp_avg");
    state["other"] = torch::zeros({1});
    expect_error([&] { resumed.load_state_dict(state); },
                 {"'fc1.bias.exp_avg' is missing", "'other' is unknown"});
  });
}

TEST(ShardOptimizer, SL_54_StateComesBack) {
  for (const bool from_full : {false, true}) {
    expect_resumes(paddle::ShardOptimizerFn(), from_full);
    expect_resumes(ShardingStage1("dp"), from_full);
    expect_resumes(ShardingStage3("dp"), from_full);
  }
}

TEST(ShardOptimizer, SL_54_MasterWeightsAreFloatAndSharded) {
  run_world(2, [](World&) {
    TwoLayers model;
    model->to(torch::kBFloat16);
    shard_layer(model, ProcessMesh({0, 1}), columns_then_rows);
    auto inner = make_adamw(model);
    auto optimizer = shard_optimizer(inner, {}, {.multi_precision = true});
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      model(values({8, 8}, step).to(torch::kBFloat16)).square().mean().backward();
      optimizer.step();
    }
    const auto state = optimizer.state_dict();
    const at::Tensor master = state.at("master_weights.fc1.weight");
    EXPECT_EQ(master.scalar_type(), torch::kFloat);
    EXPECT_EQ(placements_of(master), Placements{Shard{0}});
    EXPECT_EQ(model->fc1->weight.scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(full_tensor(master).to(torch::kBFloat16).equal(full_tensor(model->fc1->weight)));
    EXPECT_FALSE(
        full_tensor(master).to(torch::kBFloat16).to(torch::kFloat).equal(full_tensor(master)));
  });
}

TEST(ShardOptimizer, ClippingCountsEachElementOnce) {
  run_world(2, [](World&) {
    for (const bool staged : {false, true}) {
      TwoLayers model, plain;
      shard_layer(model, ProcessMesh({0, 1}), staged ? paddle::ShardFn() : columns_then_rows);
      auto inner = make_adamw(model);
      auto optimizer = staged ? shard_optimizer(inner, ShardingStage2()) : shard_optimizer(inner);
      loss_of(model, 0).backward();
      loss_of(plain, 0).backward();
      const double norm = nn::utils::clip_grad_norm_(plain->parameters(), 0.1);
      EXPECT_NEAR(optimizer.clip_grad_norm_(0.1), norm, 1e-5 * norm);
    }
  });
}

TEST(ShardOptimizer, SL_55_AnOverflowOnOneRankSkipsTheStepOnAll) {
  run_world(2, [](World& world) {
    for (const bool staged : {false, true}) {
      TwoLayers model, before;
      shard_layer(model, ProcessMesh({0, 1}), staged ? paddle::ShardFn() : columns_then_rows);
      auto inner = make_adamw(model);
      auto optimizer = staged ? shard_optimizer(inner, ShardingStage2()) : shard_optimizer(inner);
      GradScaler scaler({.init_scale = 8});
      auto sharded_scaler = paddle::shard_scaler(scaler);
      const int rank = world.rank();
      const auto hook = model->fc1->weight.register_hook([rank](const at::Tensor& gradient) {
        if (!is_dist(gradient) || rank == 0) return gradient;
        return from_local(to_local(gradient) * INFINITY, mesh_of(gradient),
                          placements_of(gradient));
      });
      sharded_scaler.scale(loss_of(model, 0)).backward();
      EXPECT_FALSE(sharded_scaler.step(optimizer));
      sharded_scaler.update();
      EXPECT_EQ(scaler.get_scale(), 4);
      expect_same(model, before);
      model->fc1->weight.remove_hook(hook);
      optimizer.zero_grad();
      sharded_scaler.scale(loss_of(model, 0)).backward();
      EXPECT_TRUE(sharded_scaler.minimize(optimizer));
    }
  });
}

TEST(ShardOptimizer, SL_55_CallsOutOfOrderAreRefused) {
  run_world(2, [](World&) {
    TwoLayers model;
    shard_layer(model, ProcessMesh({0, 1}), columns_then_rows);
    auto inner = make_adamw(model);
    auto optimizer = shard_optimizer(inner);
    GradScaler scaler;
    auto sharded_scaler = paddle::shard_scaler(scaler);
    const auto message = [](const std::function<void()>& f) -> std::string {
      try {
        f();
      } catch (const std::runtime_error& error) {
        return error.what();
      }
      return "no error";
    };
    sharded_scaler.scale(loss_of(model, 0)).backward();
    sharded_scaler.unscale_(optimizer);
    EXPECT_EQ(message([&] { sharded_scaler.unscale_(optimizer); }),
              "unscale_() has already been called on this optimizer since the last update().");
    sharded_scaler.step(optimizer);
    EXPECT_EQ(message([&] { sharded_scaler.unscale_(optimizer); }),
              "unscale_() is being called after step().");
  });
}

}  // namespace tessera::testing::shard_optimizer_test
