// Random numbers of ranks that are threads: those of a rank in a process of its own.
#include "comm/start/rank_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/comm/spawn.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <map>
#include <thread>

#include "support/models.h"

namespace tessera::testing::rank_generator_test {

using torch::Tensor;
using Draw = std::function<Tensor()>;

Tensor process_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

struct DrawInBackward : torch::autograd::Function<DrawInBackward> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {torch::dropout(gradients[0], 0.5, true)};
  }
};

Tensor draw_in_backward() {
  auto x = torch::ones({50}).requires_grad_();
  DrawInBackward::apply(x).sum().backward();
  return x.grad();
}

Tensor draw_in_script() {
  torch::jit::Module module("net");
  module.define("def forward(self, x):\n  return torch.dropout(torch.rand_like(x), 0.5, True)\n");
  return module.forward({torch::ones({50})}).toTensor();
}

Tensor draw_in_lstm() {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 5).num_layers(2).dropout(0.5));
  return std::get<0>(lstm->forward(torch::ones({3, 2, 4})));
}

// Operators of all kinds: with a generator argument or without, that make a tensor or write to one.
const std::map<std::string, Draw> kDraws = {
    {"randn", [] { return torch::randn({50}); }},
    {"rand", [] { return torch::rand({50}); }},
    {"rand in double", [] { return torch::rand({50}, torch::kDouble); }},
    {"randn_like", [] { return torch::randn_like(torch::ones({50})); }},
    {"randint", [] { return torch::randint(1000, {50}); }},
    {"randint_like", [] { return torch::randint_like(torch::ones({50}), 1000); }},
    {"randperm", [] { return torch::randperm(50); }},
    {"randperm of many", [] { return torch::randperm(40000); }},
    {"normal of numbers", [] { return torch::normal(0, 1, {50}); }},
    {"normal of tensors", [] { return at::normal(torch::zeros({50}), torch::ones({50})); }},
    {"bernoulli", [] { return torch::bernoulli(torch::full({50}, 0.5)); }},
    {"bernoulli_", [] { return torch::empty({50}).bernoulli_(torch::full({50}, 0.5)); }},
    {"multinomial", [] { return torch::multinomial(torch::ones({50}), 20); }},
    {"poisson", [] { return torch::poisson(torch::full({50}, 9.0)); }},
    {"binomial", [] { return at::binomial(torch::full({50}, 9.0), torch::full({50}, 0.5)); }},
    {"gamma", [] { return at::_standard_gamma(torch::full({50}, 2.0)); }},
    {"dirichlet", [] { return at::_sample_dirichlet(torch::full({50}, 2.0)); }},
    {"exponential_", [] { return torch::empty({50}).exponential_(); }},
    {"geometric_", [] { return torch::empty({50}).geometric_(0.1); }},
    {"cauchy_", [] { return torch::empty({50}).cauchy_(); }},
    {"log_normal_", [] { return torch::empty({50}).log_normal_(); }},
    {"random_", [] { return torch::empty({50}).random_(); }},
    {"dropout", [] { return torch::dropout(torch::ones({50}), 0.5, true); }},
    {"dropout with gradients",
     [] { return torch::dropout(torch::ones({50}).requires_grad_(), 0.5, true); }},
    {"native_dropout",
     [] { return std::get<0>(torch::native_dropout(torch::ones({50}), 0.5, true)); }},
    {"alpha_dropout", [] { return torch::alpha_dropout(torch::ones({50}), 0.5, true); }},
    {"feature_dropout",
     [] {
       return torch::feature_dropout(torch::ones({9, 9}), 0.5, true);
     }},
    {"rrelu", [] { return torch::rrelu(-torch::ones({50}), 0.1, 0.3, true); }},
    {"attention with dropout",
     [] {
       const auto x = torch::ones({1, 2, 8, 4});
       return at::scaled_dot_product_attention(x, x, x, {}, 0.5);
     }},
    {"a module", [] { return torch::nn::Linear(7, 7)->weight.detach(); }},
    {"an LSTM", draw_in_lstm},
    {"backward", draw_in_backward},
    {"TorchScript", draw_in_script},
    {"the default generator by name",
     [] { return torch::randn({50}, at::detail::getDefaultCPUGenerator()); }},
    {"default_generator()", [] { return torch::randn({50}, default_generator()); }},
};

// Two draws, to distinguish a generator that goes on from one that starts again.
std::vector<Tensor> draw_twice(const Draw& draw) { return {draw(), draw()}; }

void expect_equal(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected,
                  const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << what << ", tensor " << i;
  }
}

TEST(RankGenerator, DrawsWhatAProcessDraws) {
  for (const auto& [name, draw] : kDraws) {
    torch::manual_seed(3);
    const auto expected = draw_twice(draw);
    torch::manual_seed(3);
    torch::rand({5});
    const auto in_between = process_state();
    spawn(3, [&] {
      manual_seed(3);
      expect_equal(draw_twice(draw), expected, name);
      manual_seed(3);
      expect_equal(draw_twice(draw), expected, name + ", seeded again");
    });
    EXPECT_TRUE(torch::equal(process_state(), in_between)) << name << " left the rank's generator";
  }
}

TEST(RankGenerator, StartsAsTheProcessStands) {
  torch::manual_seed(4);
  torch::randn({5});  // leaves half of a pair of normal numbers
  const auto before = process_state();
  const auto expected = draw_twice([] { return torch::randn({5}); });
  at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl()->set_state(
      *before.unsafeGetTensorImpl());
  spawn(2, [&] { expect_equal(draw_twice([] { return torch::randn({5}); }), expected, "rank"); });
  EXPECT_TRUE(torch::equal(process_state(), before));
}

TEST(RankGenerator, IsSeededForTheCallingRankAlone) {
  spawn(3, [] {
    World world = init();
    manual_seed(10 + world.rank());
    world.process_group()->barrier({.subject = "seeded"});
    auto own = at::detail::createCPUGenerator(10 + world.rank());
    EXPECT_TRUE(torch::equal(torch::randn({20}), torch::randn({20}, own)));
  });
}

TEST(RankGenerator, InAProcessIsTheDefaultOne) {
  manual_seed(5);
  const auto expected = torch::randn({20});
  torch::manual_seed(5);
  EXPECT_TRUE(torch::equal(torch::randn({20}), expected));
  EXPECT_EQ(default_generator(), at::detail::getDefaultCPUGenerator());
}

TEST(RankGenerator, GoesOnFromASavedState) {
  spawn(2, [] {
    manual_seed(6);
    const auto state = default_generator().get_state();
    const auto expected = torch::randn({20});
    default_generator().set_state(state);
    EXPECT_TRUE(torch::equal(torch::randn({20}), expected));
  });
}

TEST(RankGenerator, LeavesOtherGeneratorsAndDevicesAlone) {
  spawn(2, [] {
    manual_seed(7);
    const auto before = default_generator().get_state();
    auto other = at::detail::createCPUGenerator(8);
    torch::randn({20}, other);
    torch::randn({20}, torch::kMeta);
    torch::empty({20}, torch::kMeta).normal_();
    EXPECT_TRUE(torch::equal(default_generator().get_state(), before));
  });
}

TEST(RankGenerator, IsThatOfThreadsThatWorkForTheRank) {
  spawn(2, [] {
    manual_seed(9);
    const auto expected = torch::randn({20});
    manual_seed(9);
    Tensor drawn;
    std::thread(at::wrapPropagateTLSState([&] { drawn = torch::randn({20}); })).join();
    EXPECT_TRUE(torch::equal(drawn, expected));
  });
}

TEST(RankGenerator, SeedingTheOneOfTheProcessIsAnError) {
  torch::manual_seed(10);
  const auto before = process_state();
  for (const int seed : {10, 11}) {
    expect_error(
        [&] {
          spawn(2, [&] {
            torch::manual_seed(seed);
            torch::dropout(torch::ones({5}), 0.5, true);
          });
        },
        {"[spawn]", "seeded with " + std::to_string(seed), "tessera::manual_seed()", " of 2"});
    EXPECT_TRUE(torch::equal(process_state(), before));
  }
}

TEST(RankGenerator, DeferredInitGivesTheValuesOfAnEagerStart) {
  struct Noisy : Mlp {
    Noisy() : Mlp(80, 3, 5) {
      noise = register_buffer("noise", torch::dropout(torch::randn({80, 80}), 0.5, true));
    }
    Tensor noise;
  };
  manual_seed(12);
  const auto expected = plain_state(*std::make_shared<Noisy>());
  const auto drawn_next = torch::rand({5});
  spawn(2, [&] {
    World world = init();
    for (const bool defer : {false, true}) {
      manual_seed(12);
      auto scope = defer ? std::make_unique<DeferredInit>() : nullptr;
      const auto net = std::make_shared<Noisy>();
      scope.reset();
      EXPECT_EQ(is_deferred(net->fcs[0]->weight), defer);
      EXPECT_TRUE(torch::equal(torch::rand({5}), drawn_next));
      expect_same_state(fully_shard(net).full_state(), expected, 0, defer ? "deferred" : "eager");
    }
  });
}

TEST(RankGenerator, NoOperatorDrawsBeforeItHasATensor) {
  // The ranks' kernels know the device from the tensors; without any, an operator must call others.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || !name.name.starts_with("aten::")) continue;
    const auto& arguments = op->schema().arguments();
    const bool draws = std::any_of(arguments.begin(), arguments.end(), is_generator);
    const bool has_tensor =
        std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
          return argument.type()->kind() == c10::TypeKind::TensorType;
        });
    if (!draws || has_tensor) continue;
    EXPECT_FALSE(op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) << toString(name);
  }
}

}  // namespace tessera::testing::rank_generator_test
