// The state around a checkpoint's function when it runs again, and refused uses.
#include <gtest/gtest.h>
#include <tessera/engine/activation_checkpoint.h>
#include <torch/script.h>

#include "support/autocast.h"
#include "support/models.h"

namespace tessera::testing::activation_checkpoint_state_test {

namespace nn = torch::nn;
using at::Tensor;

Tensor input(uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return on_test_device(torch::randn({4, 8}, generator)).requires_grad_();
}

// That of the generator from which operators of the test device draw.
Tensor random_state() {
  return tests_on_host() ? default_generator().get_state()
                         : at::globalContext().defaultGenerator(test_device()).get_state();
}

Tensor drop(const Tensor& x) { return torch::dropout(x.exp(), 0.5, true).square(); }

Tensor gradient_of(const Tensor& y, const Tensor& x) {
  return torch::autograd::grad({y.sum()}, {x})[0];
}

TEST(ActivationCheckpointState, BackwardLeavesTheGeneratorsAsTheyAre) {
  const Tensor x = input();
  manual_seed(1);
  const Tensor y = checkpoint(&drop, x);
  torch::rand({7}, test_device());
  const Tensor before = random_state();
  const Tensor grad = gradient_of(y, x);
  EXPECT_TRUE(random_state().equal(before));
  manual_seed(1);
  EXPECT_TRUE(gradient_of(drop(x), x).equal(grad));
}

TEST(ActivationCheckpointState, WithoutTheirStateTheSecondRunDrawsOtherNumbers) {
  manual_seed(1);
  const Tensor x = input();
  const Tensor y = checkpoint({.preserve_random_state = false}, &drop, x);
  const Tensor before = random_state();
  gradient_of(y, x);
  EXPECT_FALSE(random_state().equal(before));
}

TEST(ActivationCheckpointState, AGeneratorAmongTheInputsIsSetBack) {
  const auto noisy = [](const Tensor& x, const std::optional<at::Generator>& generator) {
    return x * on_test_device(torch::rand(x.sizes(), generator));
  };
  auto generator = at::make_generator<at::CPUGeneratorImpl>(9);
  const Tensor x = input();
  const Tensor y = checkpoint(noisy, x, std::optional<at::Generator>(generator));
  const Tensor before = generator.get_state();
  const Tensor grad = gradient_of(y, x);
  EXPECT_TRUE(generator.get_state().equal(before));
  EXPECT_TRUE(same_values(grad, torch::rand({4, 8}, at::make_generator<at::CPUGeneratorImpl>(9))));
}

TEST(ActivationCheckpointState, TheSecondRunHasTheAutocastOfTheFirst) {
  nn::Linear layer = seeded(3, [] { return nn::Linear(8, 8); });
  const Tensor x = input();
  auto fn = [layer](const Tensor& x) mutable { return layer(layer(x).exp()); };
  const auto gradients = [&](bool use) {
    const auto forward = [&] { return use ? checkpoint(fn, x) : fn(x); };
    const auto cast = [&] {
      const Autocast autocast(at::kBFloat16);
      return forward();
    }();
    EXPECT_EQ(cast.scalar_type(), at::kBFloat16);
    std::vector<Tensor> grads = {gradient_of(cast, x)};
    EXPECT_FALSE(at::autocast::is_autocast_enabled(test_device().type()));
    const Tensor uncast = forward();
    const Autocast autocast(at::kBFloat16);
    grads.push_back(gradient_of(uncast, x));
    EXPECT_TRUE(at::autocast::is_autocast_enabled(test_device().type()));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    return grads;
  };
  const auto with = gradients(true), without = gradients(false);
  EXPECT_TRUE(with[0].equal(without[0]));
  EXPECT_TRUE(with[1].equal(without[1]));
}

TEST(ActivationCheckpointState, TheSecondRunLeavesNoCastedParametersBehind) {
  nn::Linear layer = seeded(3, [] { return nn::Linear(8, 8); });
  const Tensor x = input();
  Tensor y;
  {
    const Autocast autocast(at::kBFloat16);
    y = checkpoint(layer, x);
  }
  y.sum().backward();
  {
    torch::NoGradGuard no_grad;
    layer->weight.zero_(), layer->bias.zero_();
  }
  const Autocast autocast(at::kBFloat16);
  EXPECT_EQ(layer(x).abs().sum().item<float>(), 0);
}

TEST(ActivationCheckpointState, ScriptsSaveTheSameEachTime) {
  torch::jit::Module module("net");
  module.register_parameter("w", torch::eye(8, test_device()).mul_(0.1).requires_grad_(), false);
  module.define(R"(
def forward(self, x):
    h = torch.tanh(torch.matmul(x, self.w)) * torch.sigmoid(x)
    return torch.matmul(torch.relu(h) * h, self.w)
)");
  const Tensor x = input();
  auto fn = [module](const Tensor& x) mutable { return module.forward({x}).toTensor(); };
  Tensor first;
  for (int call = 0; call < 4; ++call) {
    const Tensor grad = gradient_of(checkpoint(fn, x), x);
    if (!first.defined()) first = grad;
    EXPECT_TRUE(grad.equal(first));
  }
  EXPECT_TRUE(gradient_of(fn(x), x).allclose(first));
}

TEST(ActivationCheckpointState, ExceptionsLeaveEverythingAsItWas) {
  bool fails = true;
  const Tensor x = input();
  auto memory = x.storage().getWeakStorageImpl();
  const auto fn = [&](const Tensor& x) {
    const Tensor y = torch::dropout(x.exp(), 0.5, true).exp();
    memory = y.storage().getWeakStorageImpl();
    if (fails) throw std::runtime_error("fails");
    return y;
  };
  EXPECT_THROW(checkpoint(fn, x), std::runtime_error);
  EXPECT_TRUE(memory.expired());
  fails = false;
  manual_seed(1);
  Tensor y;
  {
    const Autocast autocast(at::kBFloat16);
    y = checkpoint(fn, x);
  }
  const Tensor before = random_state();
  fails = true;
  EXPECT_THROW(y.sum().backward({}, true), std::runtime_error);
  EXPECT_TRUE(memory.expired());
  EXPECT_TRUE(random_state().equal(before));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(test_device().type()));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_FALSE(is_recomputing());
  fails = false;
  const Tensor grad = gradient_of(y, x);
  manual_seed(1);
  EXPECT_TRUE(gradient_of(fn(x), x).equal(grad));
}

TEST(ActivationCheckpointState, AFunctionThatChangesAnInputInPlaceIsRefused) {
  const ActivationCheckpointOptions options{.name = "block 3"};
  const auto fn = [](const Tensor& x, const Tensor& y) {
    y.view({-1}).add_(1);
    return (x * y).exp();
  };
  const Tensor x = input();
  Tensor y = input(2).sin();
  const auto memory = y.storage().getWeakStorageImpl();
  expect_error([&] { checkpoint(options, fn, x, y); },
               {"[checkpoint] 'block 3'", "in place", "input 1"});
  y.reset();
  EXPECT_TRUE(memory.expired());
}

TEST(ActivationCheckpointState, InputsThatChangeBeforeBackwardAreNoticed) {
  const Tensor x = input(), buffer = torch::ones({4, 8}, test_device());
  const Tensor y =
      checkpoint([](const Tensor& x, const Tensor& b) { return (x * b).exp(); }, x, buffer);
  buffer.add_(1);
  expect_error([&] { y.sum().backward(); }, {"[checkpoint]", "input 1", "in place"});
}

TEST(ActivationCheckpointState, ParametersThatChangeBeforeBackwardAreNoticed) {
  nn::Linear layer = on_test_device(nn::Linear(8, 8));
  const Tensor y = checkpoint([layer](const Tensor& x) mutable { return layer(x); }, input());
  {
    torch::NoGradGuard no_grad;
    layer->weight.add_(1);
  }
  expect_error([&] { y.sum().backward(); }, {"[checkpoint]", "parameter", "[8, 8]"});
}

TEST(ActivationCheckpointState, AChangedParameterThatNoOperatorSavedIsNoticed) {
  nn::Linear layer = on_test_device(nn::Linear(8, 8));
  const Tensor y =
      checkpoint([layer](const Tensor& x) mutable { return layer(x).tanh(); }, input());
  {
    torch::NoGradGuard no_grad;
    layer->bias.add_(1);
  }
  expect_error([&] { y.sum().backward(); }, {"[checkpoint]", "parameter", "[8]"});
}

TEST(ActivationCheckpointState, AChangedParameterUsedWithoutItsGradientIsNoticed) {
  nn::Linear layer = on_test_device(nn::Linear(8, 8));
  const auto fn = [layer](const Tensor& x) {
    const auto turned = [&] {
      torch::NoGradGuard no_grad;
      return layer->weight.t();
    };
    return x.matmul(turned());
  };
  const Tensor y = checkpoint(fn, input());
  {
    torch::NoGradGuard no_grad;
    layer->weight.add_(1);
  }
  expect_error([&] { y.sum().backward(); }, {"[checkpoint]", "parameter", "[8, 8]"});
}

TEST(ActivationCheckpointState, AParameterOfATensorFromElsewhereMayChange) {
  nn::Linear earlier = on_test_device(nn::Linear(8, 8)), layer = on_test_device(nn::Linear(8, 8));
  const Tensor shift = earlier(input());
  const Tensor y =
      checkpoint([=](const Tensor& x) mutable { return layer(x + shift).tanh(); }, input(2));
  {
    torch::NoGradGuard no_grad;
    earlier->bias.add_(1);
  }
  y.sum().backward();
  const Tensor plain = layer(input(2) + shift.detach()).tanh();
  const Tensor expected = torch::autograd::grad({plain.sum()}, {layer->weight})[0];
  EXPECT_TRUE(torch::equal(layer->weight.grad(), expected));
  EXPECT_TRUE(earlier->bias.grad().defined());
}

TEST(ActivationCheckpointState, WhatIsSavedAndThenChangedIsNoticed) {
  const auto fn = [](const Tensor& x) {
    const Tensor y = x.exp();
    y.detach().add_(1);
    return y.sin();
  };
  const Tensor y = checkpoint(fn, input());
  expect_error([&] { y.sum().backward(); }, {"[checkpoint]", "changed in place after"});
}

TEST(ActivationCheckpointState, ASecondRunThatDoesSomethingElseIsNoticed) {
  using Fn = std::function<Tensor(const Tensor&)>;
  const std::vector<std::pair<Fn, std::string>> others = {
      {[](const Tensor& x) { return x.exp(); }, "2 tensors to be saved"},
      {[](const Tensor& x) { return x.exp().sin().sin(); }, "2 tensors to be saved"},
      {[](const Tensor& x) { return x.slice(0, 0, 2).exp().sin(); },
       "Float of [4, 8] on " + test_device().str()},
      {[](const Tensor& x) { return x.to(at::kDouble).exp().sin(); }, "got Double of [4, 8]"},
      {[](const Tensor& x) { return x.exp().sin().view({-1}); }, "returned tensor 0"}};
  for (const auto& [other, message] : others) {
    bool again = false;
    const auto fn = [&, other = other](const Tensor& x) {
      return std::exchange(again, true) ? other(x) : x.exp().sin();
    };
    const Tensor y = checkpoint(fn, input());
    expect_error([&] { y.sum().backward(); }, {"[checkpoint]", "must do the same", message});
  }
}

}  // namespace tessera::testing::activation_checkpoint_state_test
