// Parameters that change between a forward and its backward.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/engine/activation_checkpoint.h>
#include <tessera/engine/exponential_average.h>

#include "support/error_of.h"
#include "support/models.h"
#include "support/scratch_directory.h"

namespace tessera::testing::stale_graph_test {

constexpr const char* kStale = "modified by an inplace operation";

// Two halves, which units of 4 KiB hold together.
struct Halves : torch::nn::Module {
  Halves() {
    a = register_module("a", torch::nn::Linear(6, 6));
    a2 = register_module("a2", torch::nn::Linear(6, 3));
    b = register_module("b", torch::nn::Linear(6, 6));
    b2 = register_module("b2", torch::nn::Linear(6, 3));
  }
  torch::Tensor first() { return a2(a(x()).tanh()).square().mean(); }
  torch::Tensor second() { return b2(b(x()).tanh()).square().mean(); }
  static torch::Tensor x() { return on_test_device(torch::arange(24.).reshape({4, 6}) / 24); }

  torch::nn::Linear a{nullptr}, a2{nullptr}, b{nullptr}, b2{nullptr};
};

// A model with an optimizer for the parameters whose names contain each of some words.
class Job {
 public:
  Job(const std::vector<std::string>& words, const ShardPlan* plan) {
    if (plan) sharded_.emplace(fully_shard(net, *plan));
    for (const std::string& word : words) {
      std::vector<torch::Tensor> params;
      for (const auto& item : net->named_parameters())
        if (item.key().find(word) != std::string::npos) params.push_back(item.value());
      inner_.push_back(std::make_unique<torch::optim::AdamW>(std::move(params),
                                                             torch::optim::AdamWOptions(0.05)));
      if (sharded_)
        optimizers_.emplace_back(*sharded_, *inner_.back(),
                                 ShardedOptimizerOptions{.fused = false});
    }
  }

  void step(size_t i = 0) { sharded_ ? optimizers_[i].step() : void(inner_[i]->step()); }
  std::vector<NamedTensor> state() { return sharded_ ? sharded_->full_state() : plain_state(*net); }

  std::shared_ptr<Halves> net = seeded(3, [] { return std::make_shared<Halves>(); });

 private:
  std::optional<Sharded<Halves>> sharded_;
  std::vector<std::unique_ptr<torch::optim::AdamW>> inner_;
  std::vector<ShardedOptimizer> optimizers_;
};

struct Program {
  const char* what;
  std::vector<std::string> optimized;
  bool is_stale;  // the last call throws
  std::function<void(Job&)> run;
};

const std::vector<Program> kPrograms = {
    {"a step between forward and backward",
     {""},
     true,
     [](Job& job) {
       job.net->first().backward();
       const auto late = job.net->first();
       job.step();
       late.backward();
     }},
    {"a step between two backwards",
     {""},
     true,
     [](Job& job) {
       const auto loss = job.net->first();
       loss.backward({}, /*retain_graph=*/true);
       job.step();
       loss.backward();
     }},
    {"two backwards, then a step",
     {""},
     false,
     [](Job& job) {
       const auto loss = job.net->first();
       loss.backward({}, /*retain_graph=*/true);
       loss.backward();
       job.step();
     }},
    {"a step of parameters that had no gradient",
     {""},
     false,
     [](Job& job) {
       job.net->first().backward();
       const auto late = job.net->second();
       job.step();
       late.backward();
       job.step();
     }},
    {"a step of the other half",
     {"a", "b"},
     false,
     [](Job& job) {
       const auto generator = job.net->first(), discriminator = job.net->second();
       discriminator.backward();
       job.step(1);
       generator.backward();
       job.step(0);
     }},
    {"a step of the half that backward reads",
     {"a", "b"},
     true,
     [](Job& job) {
       const auto generator = job.net->first();
       (job.net->second() + job.net->first()).backward();
       job.step(1);
       job.step(0);
       generator.backward();
     }},
    {"a step of biases, which backward does not read",
     {"bias"},
     false,
     [](Job& job) {
       job.net->first().backward();
       const auto late = job.net->first();
       job.step();
       late.backward();
       job.step();
     }},
};

void on_each_transport(const std::vector<int>& ranks, const std::vector<ShardPlan>& plans,
                       const std::function<void(World&, const ShardPlan&)>& f) {
  for (const Transport transport : kTransports) on_worlds(ranks, plans, f, transport);
}

bool is_stale(const std::function<void()>& f, const char* why = kStale) {
  return error_of<c10::Error>(f).find(why) != std::string::npos;
}

TEST(StaleGraph, ThrowsWhereOneProcessThrowsAndIsRightWhereItIsRight) {
  for (const int64_t unit_bytes : {int64_t{0}, int64_t{4096}}) {
    on_each_transport(
        {1, 2, 3}, at_each_level({.unit_bytes = unit_bytes}),
        [&](World& world, const ShardPlan& plan) {
          for (const Program& program : kPrograms) {
            Job plain(program.optimized, nullptr), job(program.optimized, &plan);
            EXPECT_EQ(is_stale([&] { program.run(plain); }), program.is_stale) << program.what;
            EXPECT_EQ(is_stale([&] { program.run(job); }), program.is_stale) << program.what;
            expect_same_state(job.state(), plain.state(), tolerance_of(world.size()), program.what);
          }
        });
  }
}

TEST(StaleGraph, EveryCallThatSetsValuesEndsTheGraphsBeforeIt) {
  const ScratchDirectory scratch;
  on_each_transport({1, 2}, at_each_level(), [&](World&, const ShardPlan& plan) {
    const auto net = seeded(3, [] { return std::make_shared<Halves>(); });
    Sharded<Halves> sharded = fully_shard(net, plan);
    torch::optim::AdamW adamw(net->parameters());
    ShardedOptimizer optimizer(sharded, adamw);
    ExponentialAverage average(sharded);
    average.update();
    save_checkpoint(scratch / "saved", sharded, &optimizer);
    const auto state = sharded.full_state();
    const std::vector<std::pair<const char*, std::function<void()>>> changes = {
        {"load_full_state", [&] { sharded.load_full_state(state); }},
        {"load_checkpoint", [&] { load_checkpoint(scratch / "saved", sharded, &optimizer); }},
        {"swap", [&] { average.swap(); }},
    };
    for (const auto& [name, change] : changes) {
      const auto loss = net->first();
      change();
      EXPECT_TRUE(is_stale([&] { loss.backward(); })) << name;
      net->first().backward();  // goes on
    }
  });
}

// A second backward, as the values are taken in at the end of the first.
TEST(StaleGraph, ParametersThatWereGivenOtherDataEndTheirOwnGraphsOnly) {
  on_each_transport({2}, at_each_level(), [](World&, const ShardPlan& plan) {
    const auto net = seeded(3, [] { return std::make_shared<Halves>(); });
    Sharded<Halves> sharded = fully_shard(net, plan);
    const auto first = net->first(), second = net->second();
    net->a2->weight.set_data(torch::ones_like(net->a2->weight));
    net->first().backward();
    second.backward();
    EXPECT_TRUE(is_stale([&] { first.backward(); }));
  });
}

TEST(StaleGraph, AnAverageOfReplicasEndsTheGraphsBeforeIt) {
  run_world(2, [](World& world) {
    const auto net = seeded(3, [] { return std::make_shared<Halves>(); });
    Sharded<Halves> sharded =
        fully_shard(net, {.process_group = single_process_group(),
                          .replicate_group = world.process_group(),
                          .outer = OuterStep{.every = 2, .learning_rate = 1, .momentum = 0}});
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
    ShardedOptimizer optimizer(sharded, sgd);
    net->first().backward();
    optimizer.step();
    optimizer.zero_grad();
    const auto late = net->first();  // of parameters that the next step leaves to the average
    net->second().backward();
    optimizer.step();
    EXPECT_TRUE(is_stale([&] { late.backward(); }));
  });
}

TEST(StaleGraph, ARecomputedForwardNamesTheStep) {
  on_each_transport({2}, at_each_level(), [](World&, const ShardPlan& plan) {
    const auto net = seeded(3, [] { return std::make_shared<Halves>(); });
    Sharded<Halves> sharded = fully_shard(net, plan);
    torch::optim::AdamW adamw(net->parameters());
    ShardedOptimizer optimizer(sharded, adamw);
    net->first().backward();
    const auto late = checkpoint([&](const torch::Tensor& x) { return net->a(x).tanh(); },
                                 Halves::x().requires_grad_());
    optimizer.step();
    EXPECT_TRUE(is_stale([&] { late.sum().backward(); },
                         "a parameter was changed in place between forward and backward"));
  });
}

}  // namespace tessera::testing::stale_graph_test
