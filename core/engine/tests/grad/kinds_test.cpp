// Parameters of special kinds: unused, frozen, of several dtypes, tied, empty, in other memory
// formats.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"

namespace tessera::testing::kinds_test {

// A model given by two functions.
struct Custom : Net {
  using Build = std::function<void(Custom&)>;
  using Forward = std::function<torch::Tensor(Custom&, torch::Tensor)>;
  Custom(const Build& build, Forward f) : f(std::move(f)) { build(*this); }
  torch::Tensor forward(torch::Tensor x) override { return f(*this, std::move(x)); }
  torch::nn::Linear linear(const std::string& name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(in, out));
  }
  torch::Tensor parameter(const std::string& name, torch::Tensor value, bool requires_grad = true) {
    return register_parameter(name, std::move(value), requires_grad);
  }
  torch::Tensor operator[](const std::string& name) { return named_parameters()[name]; }
  torch::Tensor apply_linear(const std::string& name, const torch::Tensor& x) {
    return torch::nn::functional::linear(x, (*this)[name + ".weight"], (*this)[name + ".bias"]);
  }
  Forward f;
};

TrainingRun custom_run(const Custom::Build& build, const Custom::Forward& forward) {
  TrainingRun run;
  run.make_net = [=] {
    return seeded(7, [&] { return std::make_shared<Custom>(build, forward); });
  };
  run.make_optimizer = [](Net& net) {
    return std::make_unique<torch::optim::SGD>(
        net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
  };
  return run;
}

void expect_parity_everywhere(const TrainingRun& run, double tolerance = 0) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t unit_bytes : {0, 1 << 20}) {
      expect_parity_of_each(run, ranks,
                            cases_of(with_each_partition({.unit_bytes = unit_bytes}),
                                     std::max(tolerance, tolerance_of(ranks))));
    }
  }
}

TEST(ParameterKinds, UnusedOnAllRanksAreNotUpdatedNotEvenByWeightDecay) {
  expect_parity_everywhere(custom_run(
      [](Custom& net) {
        net.linear("a", 37, 37);
        net.linear("unused", 37, 37);
        net.linear("b", 37, 5);
      },
      [](Custom& net, torch::Tensor x) {
        return net.apply_linear("b", torch::gelu(net.apply_linear("a", x)));
      }));
}

// The gradient of a function that is constant almost everywhere is a tensor without memory.
TEST(ParameterKinds, GradientsWithoutMemoryAreZeros) {
  expect_parity_everywhere(custom_run(
      [](Custom& net) {
        net.linear("a", 37, 5);
        net.parameter("large", torch::linspace(-1, 1, 300 * 5).view({300, 5}));
        net.parameter("small", torch::linspace(-1, 1, 5));
      },
      [](Custom& net, torch::Tensor x) {
        // Rank 0 comes first in one process, where LibTorch adds to no gradient without memory.
        const auto of = [&](const char* name) {
          return net.rank == 0 ? net[name] : torch::sgn(net[name]);
        };
        return net.apply_linear("a", x) + of("large").mean(0) + of("small");
      }));
}

TEST(ParameterKinds, UnusedOnSomeRanksAreAveragedWithZeros) {
  expect_parity_everywhere(custom_run(
      [](Custom& net) {
        net.linear("a", 37, 37);
        net.linear("sometimes", 37, 37);
        net.linear("b", 37, 5);
      },
      [](Custom& net, torch::Tensor x) {
        x = torch::gelu(net.apply_linear("a", x));
        if (net.rank == net.step % 2) x = x + net.apply_linear("sometimes", x);
        return net.apply_linear("b", x);
      }));
}

TEST(ParameterKinds, TiedWeightsAreOneParameter) {
  // The same tensor under two names, and two tensors on one storage.
  for (const bool same_tensor : {true, false}) {
    const auto tie = [same_tensor](const torch::Tensor& w) {
      return same_tensor ? w : w.detach().requires_grad_();
    };
    auto run = custom_run(
        [tie](Custom& net) {
          const auto embed = net.linear("embed", 37, 5);
          net.parameter("head", tie(embed->weight));
        },
        [](Custom& net, torch::Tensor x) {
          return torch::gelu(net.apply_linear("embed", x)).matmul(net["head"]).slice(1, 0, 5);
        });
    const auto tied_sgd = run.make_optimizer;
    const auto plain_sgd = [](Net& net) {
      auto params = net.parameters();
      params.erase(params.begin());  // "head": one process must not step a tied parameter twice
      return std::make_unique<torch::optim::SGD>(params,
                                                 torch::optim::SGDOptions(0.1).momentum(0.9));
    };
    if (same_tensor) {
      run.make_optimizer = plain_sgd;
      expect_parity_everywhere(run);
      continue;
    }
    // On another device they were moved to memory of their own.
    run.make_net = [make_net = run.make_net] {
      const auto net = make_net();
      Custom& custom = static_cast<Custom&>(*net);
      custom["head"].set_data(custom["embed.weight"].detach());
      return net;
    };
    // In one process the tensors on one storage have gradients of their own: compare with the same
    // tensor.
    auto reference = run;
    reference.make_net = [forward = static_cast<Custom&>(*run.make_net()).f] {
      const auto build = [](Custom& net) {
        const auto embed = net.linear("embed", 37, 5);
        net.parameter("head", embed->weight);
      };
      return seeded(7, [&] { return std::make_shared<Custom>(build, forward); });
    };
    reference.make_optimizer = run.make_optimizer = plain_sgd;
    for (const int ranks : {1, 2, 3})
      expect_each_has(train_alone(reference, ranks), run, ranks, cases_of(at_each_level(), 2e-6));
  }
}

TEST(ParameterKinds, EmptyAndScalarParametersAndSingleElementsWork) {
  expect_parity_everywhere(custom_run(
      [](Custom& net) {
        net.parameter("none", torch::empty({0}));
        net.parameter("scale", torch::tensor(1.5F));
        net.linear("a", 37, 5);
        net.parameter("no_rows", torch::empty({0, 3}));
        net.parameter("shift", torch::ones({1, 1, 1}));
      },
      [](Custom& net, torch::Tensor x) {
        x = net.apply_linear("a", x * net["scale"]) + net["shift"][0][0];
        return x + net["none"].sum() + net["no_rows"].sum();
      }));
}

TEST(ParameterKinds, SeveralDtypesWithFrozenIntegersTrainTogether) {
  const auto run = custom_run(
      [](Custom& net) {
        net.linear("a", 37, 37);
        net.parameter("half", torch::randn({37, 37}).mul(0.1).to(torch::kBFloat16));
        net.parameter("index", torch::arange(36, -1, -1), false);
        net.parameter("twice", torch::randn({37, 5}, torch::kDouble).mul(0.1));
        net.parameter("frozen", torch::randn({37}), false);
      },
      [](Custom& net, torch::Tensor x) {
        x = torch::gelu(net.apply_linear("a", x)).index_select(1, net["index"]) + net["frozen"];
        x = x.to(torch::kBFloat16).matmul(net["half"]).to(torch::kDouble);
        return x.matmul(net["twice"]).to(torch::kFloat);
      });
  // Sums of bfloat16 are taken in float32 and rounded once, not once per addition.
  expect_parity_everywhere(run, 2e-2);
}

TEST(ParameterKinds, ChannelsLastConvolutionsKeepTheirLayout) {
  struct Conv : Net {
    Conv() {
      a = register_module("a", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)));
      norm = register_module("norm", torch::nn::BatchNorm2d(8));
      b = register_module("b", torch::nn::Linear(8, 5));
      a->weight.set_data(a->weight.contiguous(at::MemoryFormat::ChannelsLast));
    }
    torch::Tensor forward(torch::Tensor x) override {
      x = x.view({-1, 3, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast);
      return b->forward(torch::relu(norm->forward(a->forward(x))).mean({2, 3}));
    }
    torch::nn::Conv2d a{nullptr};
    torch::nn::BatchNorm2d norm{nullptr};
    torch::nn::Linear b{nullptr};
  };
  auto run = sgd_run<Conv>();
  run.in = 36;
  for (const int ranks : {1, 2, 3}) {
    const auto expected = train_alone(run, ranks);
    for (const auto level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
      run_world(ranks, [&](World& world) {
        const auto net = std::static_pointer_cast<Conv>(run.make_net());
        const auto sharded = fully_shard(net, {.level = level});
        EXPECT_TRUE(net->a->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
        auto state = train_sharded(run, world, {.level = level});
        for (const auto& named : expected) {
          if (named.name.find("running") != std::string::npos ||
              named.name.find("num") != std::string::npos) {
            continue;  // running statistics are each rank's own
          }
          const auto it = std::find_if(state.begin(), state.end(), [&](const NamedTensor& other) {
            return other.name == named.name;
          });
          EXPECT_TRUE(close_values(it->tensor, named.tensor, 2e-6)) << named.name;
        }
      });
    }
  }
}

TEST(ParameterKinds, RequiresGradMayChangeBetweenSteps) {
  const auto forward = [](Custom& net, torch::Tensor x) {
    for (auto& item : net.named_parameters()) {
      if (item.key().starts_with("b.")) item.value().requires_grad_(net.step % 2 == 1);
      if (item.key().starts_with("a.")) item.value().requires_grad_(net.step < 2);
    }
    return net.apply_linear(
        "c", torch::gelu(net.apply_linear("b", torch::gelu(net.apply_linear("a", x)))));
  };
  expect_parity_everywhere(custom_run(
      [](Custom& net) {
        net.linear("a", 37, 37);
        const auto b = net.linear("b", 37, 37);
        for (auto& param : b->parameters()) param.requires_grad_(false);
        net.linear("c", 37, 5);
      },
      forward));
}

}  // namespace tessera::testing::kinds_test
