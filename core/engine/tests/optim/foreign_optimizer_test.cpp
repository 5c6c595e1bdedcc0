// Optimizers whose state lies outside of LibTorch's, as those of another language.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/engine/foreign_optimizer.h>

#include <map>

#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::foreign_optimizer_test {

namespace optim = torch::optim;

// AdamW with tables of its own, stepped by the operators of LibTorch's class, in their order.
class Tables : public ForeignOptimizer {
 public:
  Tables(const std::vector<std::vector<at::Tensor>>& groups, double lr)
      : ForeignOptimizer(groups), options_(groups.size()) {
    for (Values& options : options_)
      options = {{"lr", lr},         {"betas", std::vector<double>{0.9, 0.999}},
                 {"eps", 1e-8},      {"weight_decay", 0.01},
                 {"amsgrad", false}, {"capturable", c10::IValue()}};
  }

  std::string kind() const override { return "AdamW"; }
  bool elementwise() const override { return true; }
  Values read_state(const at::Tensor& param) const override {
    const auto it = states_.find(param.unsafeGetTensorImpl());
    return it == states_.end() ? Values() : it->second;
  }
  void write_state(const at::Tensor& param, const Values& values) override {
    if (values.empty()) {
      states_.erase(param.unsafeGetTensorImpl());
    } else {
      states_[param.unsafeGetTensorImpl()] = values;
    }
  }
  Values read_options(size_t group) const override { return options_[group]; }
  void write_options(size_t group, const Values& values) override {
    for (const auto& [name, value] : values) options_[group][name] = value;
  }

  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    torch::NoGradGuard no_grad;
    for (size_t group = 0; group < param_groups().size(); ++group)
      for (const at::Tensor& param : param_groups()[group].params())
        if (param.grad().defined()) step(param, options_[group].at("lr").toDouble());
    return {};
  }
  size_t states() const { return states_.size(); }

 private:
  void step(const at::Tensor& param, double lr) {
    Values& state = states_[param.unsafeGetTensorImpl()];
    if (state.empty())
      state = {{"step", torch::zeros({})},
               {"exp_avg", torch::zeros_like(param)},
               {"exp_avg_sq", torch::zeros_like(param)}};
    // Of a checkpoint, it may be a count.
    const double step = state["step"].isInt() ? state["step"].toInt() + 1
                                              : state["step"].toTensor().item<double>() + 1;
    state["step"] = torch::full({}, step);
    const at::Tensor average = state["exp_avg"].toTensor(), square = state["exp_avg_sq"].toTensor();
    param.mul_(1 - lr * 0.01);
    average.mul_(0.9).add_(param.grad(), 1 - 0.9);
    square.mul_(0.999).addcmul_(param.grad(), param.grad(), 1 - 0.999);
    const at::Tensor denominator =
        (square.sqrt() / std::sqrt(1 - std::pow(0.999, step))).add_(1e-8);
    param.addcdiv_(average, denominator, -lr / (1 - std::pow(0.9, step)));
  }

  std::map<const void*, Values> states_;
  std::vector<Values> options_;
};

template <class Optimizer>
std::unique_ptr<optim::Optimizer> make(Net& net) {
  if constexpr (std::is_same_v<Optimizer, Tables>) {
    return std::make_unique<Tables>(std::vector<std::vector<at::Tensor>>{net.parameters()}, 0.01);
  } else {
    return std::make_unique<Optimizer>(net.parameters(), optim::AdamWOptions(0.01));
  }
}

TrainingRun run_of(const std::function<std::unique_ptr<optim::Optimizer>(Net&)>& make_optimizer) {
  TrainingRun run = sgd_run<Mlp>();
  run.make_optimizer = make_optimizer;
  return run;
}

TEST(ForeignOptimizer, StepsAsInOneProcess) {
  for (const int ranks : {1, 2, 3})
    expect_parity_of_each(run_of(make<Tables>), ranks, cases_of(with_each_partition()));
}

TEST(ForeignOptimizer, StepsAsLibTorchsClass) {
  const auto want = train_alone(run_of(make<optim::AdamW>), 2);
  expect_same_state(train_alone(run_of(make<Tables>), 2), want, 0, "alone");
}

TEST(ForeignOptimizer, IsOffloaded) {
  std::vector<ParityCase> cases;
  for (const Partition partition : kPartitions)
    cases.push_back({{.partition = partition, .unit_bytes = 4096, .offload = Offload::kHost}});
  expect_parity_of_each(run_of(make<Tables>), 2, cases);
}

// A model and its optimizer, trained on the rows of all ranks.
struct Trained : ShardedJob<Net> {
  Trained(World& world, std::unique_ptr<optim::Optimizer> (*make)(Net&), const ShardPlan& plan = {})
      : ShardedJob(run_of(make), world, plan) {
    sees_all_rows = true;
  }
};

TEST(ForeignOptimizer, SharesCheckpointsWithLibTorchsClass) {
  const ScratchDirectory scratch;
  const auto makers = {make<Tables>, make<optim::AdamW>};
  const State want = results_of(2, [](World& world) {
    Trained one(world, make<optim::AdamW>);
    one.train(0, 4);
    return one.state();
  })[0];
  for (const auto saver : makers) {
    run_world(2, [&](World& world) {
      Trained one(world, saver);
      one.train(0, 2);
      save_checkpoint(scratch / "one", one.sharded, &one.optimizer);
    });
    run_world(3, [&](World& world) {
      for (const auto loader : makers) {
        Trained one(world, loader);
        load_checkpoint(scratch / "one", one.sharded, &one.optimizer);
        one.train(2, 4);
        expect_same_state(one.state(), want, 1e-6, "resumed");
      }
    });
  }
}

TEST(ForeignOptimizer, FullStateIsTheOneOfOneProcess) {
  for (const Partition partition : kPartitions) {
    run_world(3, [&](World& world) {
      Trained one(world, make<Tables>, {.partition = partition}), other(world, make<Tables>);
      one.train(0, 3);
      const OptimizerStateDict dict = full_state_dict(one.optimizer, -1);
      ASSERT_EQ(dict.state.size(), one.net->parameters().size());
      EXPECT_EQ(dict.param_groups.at(0).options.at("lr").toDouble(), 0.01);
      for (const auto& [number, values] : dict.state) {
        EXPECT_EQ(values.at("step").toTensor().item<double>(), 3);
        EXPECT_EQ(values.at("exp_avg").toTensor().sizes(), other.state().at(number).tensor.sizes());
      }
      other.sharded.load_full_state(one.state());
      load_full_state_dict(other.optimizer, dict);
      one.train(3, 5);
      other.train(3, 5);
      expect_same_state(other.state(), one.state(), 0, "loaded");
    });
  }
}

TEST(ForeignOptimizer, AFailedLoadKeepsItsState) {
  run_world(2, [&](World& world) {
    Trained one(world, make<Tables>), other(world, make<Tables>);
    one.train(0, 2);
    other.train(0, 2);
    OptimizerStateDict dict = full_state_dict(one.optimizer, -1);
    dict.state.at(0).at("exp_avg") = torch::zeros({3, 3});
    EXPECT_THROW(load_full_state_dict(one.optimizer, dict), c10::ValueError);
    one.train(2, 3);
    other.train(2, 3);
    expect_same_state(other.state(), one.state(), 0, "unchanged");
  });
}

TEST(ForeignOptimizer, CountsAreNoBytesOfItsState) {
  run_world(2, [&](World& world) {
    const ShardPlan plan{.unit_bytes = 4096, .offload = Offload::kHost};
    Trained one(world, make<Tables>, plan), other(world, make<optim::AdamW>, plan);
    for (Trained* const trained : {&one, &other}) trained->train(0, 1);
    EXPECT_EQ(one.optimizer.memory().offloaded, other.optimizer.memory().offloaded);
    one.optimizer.keep_on_device(1 << 30);
    other.optimizer.keep_on_device(1 << 30);
    EXPECT_EQ(one.optimizer.memory().optimizer_state, other.optimizer.memory().optimizer_state);
    EXPECT_EQ(one.optimizer.memory().offloaded, 0);
  });
}

TEST(ForeignOptimizer, UnwrapGivesItTheWholeState) {
  run_world(2, [&](World& world) {
    Trained one(world, make<Tables>);
    one.train(0, 2);
    one.optimizer.unwrap();
    one.sharded.unwrap();
    auto& tables = static_cast<Tables&>(*one.inner);
    EXPECT_EQ(tables.states(), one.net->parameters().size());
    for (const at::Tensor& param : one.net->parameters()) {
      EXPECT_EQ(tables.param_groups()[0].params().size(), one.net->parameters().size());
      EXPECT_EQ(tables.read_state(param).at("exp_avg_sq").toTensor().sizes(), param.sizes());
    }
  });
}

// --- tensors by name ---------------------------------------------------------------------------

TEST(NamedTensors, AreShardedWithoutAModule) {
  run_world(2, [&](World& world) {
    Trained module(world, make<optim::AdamW>);
    auto net = seeded(7, [] { return std::make_shared<Mlp>(); });
    std::vector<NamedTensor> parameters, buffers;
    for (const auto& item : net->named_parameters())
      parameters.push_back({item.key(), item.value()});
    for (const auto& item : net->named_buffers()) buffers.push_back({item.key(), item.value()});
    ShardedModule sharded = fully_shard(parameters, buffers, {.unit_bytes = 4096});
    auto inner = make<optim::AdamW>(*net);
    ShardedOptimizer optimizer(sharded, *inner, {.fused = false});
    for (int step = 0; step < 3; ++step) {
      const Batch batch = global_batch(step, 12, 37, 5);
      optimizer.zero_grad();
      torch::mse_loss(net->forward(batch.x), batch.y).backward();
      optimizer.step();
    }
    module.train(0, 3);
    expect_same_state(sharded.full_state(), module.state(), 0, "by name");
  });
}

TEST(LocalGrad, IsThisRanksPartOfTheWholeGradient) {
  on_worlds({3}, with_each_partition(), [](World& world, const ShardPlan& plan) {
    auto net = seeded(7, [] { return std::make_shared<Mlp>(); });
    auto sharded = fully_shard(net, plan);
    const at::Tensor first = net->parameters().front();
    EXPECT_FALSE(sharded.local_grad(first).defined());
    EXPECT_FALSE(sharded.has_grad(first));
    EXPECT_TRUE(is_sharded(first));
    EXPECT_FALSE(is_sharded(torch::ones({2})));
    const Batch batch = global_batch(0, 12, 37, 5);
    torch::mse_loss(net->forward(batch.x), batch.y).backward();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(sharded.has_grad(item.value()));
      const at::Tensor whole = sharded.full_grad(item.key());
      const at::Tensor part = sharded.local_grad(item.key());
      // The parts of all ranks, of which some may be empty, are the whole.
      const double sum = part.defined() ? part.sum(at::kDouble).item<double>() : 0;
      const at::Tensor total = torch::full({1}, sum, at::kDouble);
      world.process_group()->all_reduce(total, ReduceOp::kSum, {"total"})->wait();
      const double copies = plan.level == ShardLevel::kNone ? 3 : 1;
      EXPECT_NEAR(total.item<double>(), copies * whole.sum(at::kDouble).item<double>(), 1e-5);
      if (part.defined() && plan.partition == Partition::kWholeParam) {
        EXPECT_TRUE(torch::equal(part, whole));
      }
    }
    EXPECT_THROW(sharded.local_grad("none"), c10::ValueError);
    EXPECT_THROW(sharded.local_grad(torch::ones({2})), c10::ValueError);
  });
}

}  // namespace tessera::testing::foreign_optimizer_test
