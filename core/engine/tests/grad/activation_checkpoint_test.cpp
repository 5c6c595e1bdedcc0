// Checkpoints in one process: values, gradients, memory.
#include <gtest/gtest.h>
#include <tessera/engine/activation_checkpoint.h>
#include <torch/csrc/autograd/engine.h>

#include "support/models.h"

namespace tessera::testing::activation_checkpoint_test {

namespace nn = torch::nn;
using at::Tensor;
using Tensors = std::vector<Tensor>;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width = 8)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        up(register_module("up", nn::Linear(width, 2 * width))),
        down(register_module("down", nn::Linear(2 * width, width))) {}
  Tensor forward(const Tensor& x) {
    const Tensor h = torch::dropout(torch::gelu(up(norm(x))), 0.3, is_training());
    return x + torch::rrelu(down(h), 0.1, 0.4, is_training());
  }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(Block);

Block make_block() {
  return seeded(3, [] { return Block(); });
}

Tensor input(uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return on_test_device(torch::randn({4, 8}, generator)).requires_grad_();
}

void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << i;
    if (expected[i].defined()) {
      EXPECT_TRUE(actual[i].equal(expected[i])) << i;
    }
  }
}

// Returns the gradients of `leaves` for the loss that `run` returns, all from one random state.
Tensors gradients(const std::function<Tensor()>& run, const Tensors& leaves) {
  for (const Tensor& leaf : leaves) leaf.mutable_grad().reset();
  manual_seed(11);
  run().backward();
  Tensors grads = {torch::rand({3}, test_device())};  // shows whether as many numbers were drawn
  for (const Tensor& leaf : leaves) grads.push_back(leaf.grad());
  return grads;
}

using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
Weak memory_of(const Tensor& tensor) { return tensor.storage().getWeakStorageImpl(); }

TEST(ActivationCheckpoint, GradientsAreThoseWithoutIt) {
  Block first = make_block(), second = make_block();
  Tensors leaves = {input()};
  for (const auto& block : {first, second})
    for (const Tensor& parameter : block->parameters()) leaves.push_back(parameter);
  const auto plain = [&] { return second(first(leaves[0])).square().sum(); };
  const auto checkpointed = [&] {
    return checkpoint(second, checkpoint(first, leaves[0])).square().sum();
  };
  const auto one = [&] {
    return checkpoint([&](const Tensor& x) { return second(first(x)); }, leaves[0]).square().sum();
  };
  const Tensors expected = gradients(plain, leaves);
  expect_equal(gradients(checkpointed, leaves), expected);
  expect_equal(gradients(one, leaves), expected);
}

TEST(ActivationCheckpoint, ParametersGetGradientsThoughNoInputRequiresThem) {
  Block block = make_block();
  const Tensor x = input().detach();
  const auto leaves = block->parameters();
  expect_equal(gradients([&] { return checkpoint(block, x).sum(); }, leaves),
               gradients([&] { return block(x).sum(); }, leaves));
}

TEST(ActivationCheckpoint, WhatTheFunctionSavesIsFreedUntilBackwardAndAfterItsUse) {
  for (const bool use : {false, true}) {
    std::vector<Weak> memory;
    const auto run = [&](Tensor x) {
      for (int i = 0; i < 3; ++i) {
        x = x.exp();  // saves its result
        memory.push_back(memory_of(x));
      }
      return x.sum();
    };
    const auto alive = [&] {
      return std::count_if(memory.begin(), memory.end(),
                           [](const Weak& one) { return !one.expired(); });
    };
    const Tensor x = input();
    const Tensor y = use ? checkpoint(run, x) : run(x);
    EXPECT_EQ(alive(), use ? 0 : 3);
    y.backward({}, /*retain_graph=*/true);
    EXPECT_EQ(memory.size(), use ? 6 : 3);
    EXPECT_EQ(alive(), use ? 0 : 3);
  }
}

TEST(ActivationCheckpoint, TheFunctionAndItsInputsAreFreedWithTheGraph) {
  for (const bool backward : {false, true}) {
    auto token = std::make_shared<int>(0);
    const std::weak_ptr<int> function = token;
    Tensor y = [&] {
      const Tensor x = input().sin();
      const Weak memory = memory_of(x);
      auto fn = [token = std::move(token)](const Tensor& x) { return std::tuple(x.exp(), x); };
      Tensor y = std::get<0>(checkpoint(std::move(fn), x)).sin().sum();
      EXPECT_FALSE(memory.expired());
      return y;
    }();
    EXPECT_FALSE(function.expired());
    backward ? y.backward() : y.reset();
    EXPECT_TRUE(function.expired());
  }
}

TEST(ActivationCheckpoint, TheFunctionRunsOnceMorePerBackward) {
  int runs = 0, again = 0;
  const auto run = [&](const Tensor& x) {
    ++runs;
    again += is_recomputing();
    return x.sin().exp().sin();
  };
  const Tensor y = checkpoint(run, input()).sum();
  EXPECT_EQ(runs, 1);
  y.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(runs, 2);
  y.backward();
  EXPECT_EQ(runs, 3);
  EXPECT_EQ(again, 2);
  EXPECT_FALSE(is_recomputing());
  torch::NoGradGuard no_grad;
  EXPECT_FALSE(checkpoint(run, input()).requires_grad());
  EXPECT_EQ(runs, 4);
}

TEST(ActivationCheckpoint, BackwardTwiceAddsUp) {
  const Tensor x = input();
  const auto twice = [&](const Tensor& y) {
    y.backward({}, /*retain_graph=*/true);
    y.backward();
    return torch::zeros({}).requires_grad_();
  };
  Block block = make_block();
  expect_equal(gradients([&] { return twice(checkpoint(block, x).sum()); }, {x}),
               gradients([&] { return twice(block(x).sum()); }, {x}));
}

TEST(ActivationCheckpoint, TakesInputsAndResultsOfAnyKind) {
  using Two = std::tuple<Tensor, Tensor>;
  const Tensor a = input(1), b = input(2), c = input(3), d = input(4);
  const Tensor rows = on_test_device(torch::tensor({2, 0, 1}));
  const auto fn = [](const Tensor& a, Tensors list, std::optional<Tensor> maybe,
                     const std::optional<Tensor>& nothing, const Two& two, const Tensor& rows,
                     double factor, const Tensor& same, const char* /*text*/) {
    EXPECT_FALSE(nothing.has_value());
    const Tensor y = (a * list[0]).exp() * *maybe + std::get<0>(two) * same.sin() * factor;
    return std::make_tuple(a, y.index_select(0, rows), Tensors{y.argmax(0), list[0] * list[1]},
                           std::make_pair(y.detach(), std::optional<Tensor>(y.cos())), 5);
  };
  const auto loss = [](const auto& result) {
    const auto& [same, rows, list, pair, number] = result;
    EXPECT_FALSE(list[0].requires_grad());
    EXPECT_FALSE(pair.first.requires_grad());
    EXPECT_EQ(number, 5);
    return (same.sum() + rows.square().sum() + list[1].sum()) * number + pair.second->sum();
  };
  const Tensors leaves = {a, b, c, d};
  const Tensor plain = a.detach();
  const auto with = [&] {
    return loss(checkpoint(fn, a, Tensors{b, plain}, std::optional<Tensor>(c),
                           std::optional<Tensor>(), Two(d, plain), rows, 0.5, a, "text"));
  };
  const auto without = [&] {
    return loss(fn(a, {b, plain}, c, std::nullopt, {d, plain}, rows, 0.5, a, "text"));
  };
  expect_equal(gradients(with, leaves), gradients(without, leaves));
}

Tensor cube(const Tensor& x) { return x.exp() * x * x; }

TEST(ActivationCheckpoint, TakesFunctionsOfAnyKind) {
  const Tensor x = input();
  const auto mlp = seeded(3, [] { return std::make_shared<Mlp>(8, 2, 8); });
  const std::shared_ptr<Net> net = mlp;
  nn::Sequential sequence = on_test_device(nn::Sequential(nn::Linear(8, 8), nn::Tanh()));
  expect_equal(gradients([&] { return checkpoint(&cube, x).sum(); }, {x}),
               gradients([&] { return cube(x).sum(); }, {x}));
  expect_equal(gradients([&] { return checkpoint(net, x).sum(); }, {x}),
               gradients([&] { return net->forward(x).sum(); }, {x}));
  expect_equal(gradients([&] { return checkpoint(sequence, x).sum(); }, {x}),
               gradients([&] { return sequence->forward(x).sum(); }, {x}));
  // Each run starts from the function's initial state.
  const auto counting = [&] {
    return [calls = 0](const Tensor& x) mutable { return (x * ++calls).exp(); };
  };
  expect_equal(gradients([&] { return checkpoint(counting(), x).sum(); }, {x}),
               gradients([&] { return x.exp().sum(); }, {x}));
}

TEST(ActivationCheckpoint, TensorsThatTheFunctionCapturesGetGradients) {
  const Tensor x = input(1), leaf = input(2);
  const auto loss = [&](bool use) {
    const Tensor made = leaf.sin();
    const auto fn = [made](const Tensor& x) { return (x * made).exp() * made; };
    return (use ? checkpoint(fn, x) : fn(x)).sum();
  };
  expect_equal(gradients([&] { return loss(true); }, {x, leaf}),
               gradients([&] { return loss(false); }, {x, leaf}));
}

TEST(ActivationCheckpoint, WorksWithGradAndDoubleBackward) {
  Block block = make_block();
  const Tensor x = input();
  const auto both = [&](bool use) {
    manual_seed(5);
    const Tensor y = (use ? checkpoint(block, x) : block(x)).square().sum();
    Tensors leaves = {x, block->up->weight};
    Tensors grads = torch::autograd::grad({y}, leaves, {}, {}, /*create_graph=*/true);
    const Tensors second = torch::autograd::grad({grads[0].square().sum()}, leaves);
    grads.insert(grads.end(), second.begin(), second.end());
    return grads;
  };
  expect_equal(both(true), both(false));
}

TEST(ActivationCheckpoint, TheFunctionMayItselfRunABackward) {
  const Tensor x = input();
  const auto fn = [](const Tensor& x) {
    const Tensor energy = (x.sin() * x.exp()).sum();
    return torch::autograd::grad({energy}, {x}, {}, true, /*create_graph=*/true)[0];
  };
  expect_equal(gradients([&] { return checkpoint(fn, x).square().sum(); }, {x}),
               gradients([&] { return fn(x).square().sum(); }, {x}));
}

TEST(ActivationCheckpoint, Nests) {
  Block first = make_block(), second = make_block();
  const Tensor x = input();
  Tensors leaves = {x};
  for (const Tensor& parameter : first->parameters()) leaves.push_back(parameter);
  int runs = 0;
  Weak between = memory_of(x);
  auto inner = [&, second](const Tensor& x) mutable { return ++runs, second(x); };
  auto outer = [&, first](const Tensor& x) mutable {
    const Tensor y = checkpoint(first, x);
    between = memory_of(y);
    return checkpoint(inner, y).exp();
  };
  const auto nested = [&] {
    const Tensor loss = checkpoint(outer, x).sum();
    EXPECT_TRUE(between.expired());
    EXPECT_EQ(runs, 1);
    return loss;
  };
  expect_equal(gradients(nested, leaves),
               gradients([&] { return second(first(x)).exp().sum(); }, leaves));
  EXPECT_EQ(runs, 3);
  EXPECT_TRUE(between.expired());
}

struct Fails : torch::autograd::Function<Fails> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.sin(); }
  static Tensors backward(torch::autograd::AutogradContext*, Tensors) {
    throw std::runtime_error("backward fails");
  }
};

TEST(ActivationCheckpoint, ABackwardThatFailsLeavesNothingBehind) {
  const Tensor x = input();
  Weak memory = memory_of(x);
  const auto fn = [&](const Tensor& x) {
    const Tensor y = x.exp();
    memory = memory_of(y);
    return Fails::apply(y).exp();
  };
  const Tensor y = checkpoint(fn, x).sum();
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true), std::runtime_error);
  x.cpu();  // waits: operators that a device has yet to run keep their tensors
  EXPECT_TRUE(memory.expired());
}

TEST(ActivationCheckpoint, WorksAlsoAfterAnotherEngineWasInstalled) {
  const Tensor x = input();
  for (int i = 0; i < 2; ++i) {
    Weak memory = memory_of(x);
    const Tensor y = checkpoint(
        [&](const Tensor& x) {
          const Tensor y = x.exp();
          memory = memory_of(y);
          return y.sin();
        },
        x);
    EXPECT_TRUE(memory.expired());
    y.sum().backward();
    torch::autograd::set_default_engine_stub(&torch::autograd::Engine::get_base_engine);
  }
}

// Reads its saved tensors twice.
struct ReadsTwice : torch::autograd::Function<ReadsTwice> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x, x.sin()});
    return x.sin();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors grads) {
    const Tensor x = context->get_saved_variables()[0];
    return {grads[0] * x.cos() + 0 * context->get_saved_variables()[1]};
  }
};

TEST(ActivationCheckpoint, FunctionsMayReadWhatTheySavedTwice) {
  const Tensor x = input();
  const auto fn = [](const Tensor& x) { return ReadsTwice::apply(x.exp()).exp(); };
  expect_equal(gradients([&] { return checkpoint(fn, x).sum(); }, {x}),
               gradients([&] { return fn(x).sum(); }, {x}));
}

}  // namespace tessera::testing::activation_checkpoint_test
