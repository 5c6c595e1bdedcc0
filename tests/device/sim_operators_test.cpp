// Operators of the simulated accelerator have the bits of the CPU's, whatever the delays.
#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <memory>

#include "device/sim_tensors.h"

namespace tessera::testing::sim_operators_test {

using namespace sim_tensors;
using namespace std::chrono_literals;

TEST(SimDeviceKernels, TakeCpuNumbersAndNoOtherCpuTensors) {
  const auto sim = sim::use(2, 50us);
  const at::Tensor x = torch::ones({4}, on(0));
  at::Tensor number = torch::tensor(3.0F);
  const at::Tensor y = x * number + 1.5;
  number.fill_(9);  // the operator has read it
  EXPECT_TRUE(same_bits(y, torch::full({4}, 4.5F)));
  EXPECT_TRUE(same_bits(torch::where(x > 0, x, torch::tensor(0.0F)), torch::ones({4})));
  const auto is_refused = [&](const std::function<void()>& call) {
    return contains(error_text(call), "Expected all tensors to be on the same device");
  };
  EXPECT_TRUE(is_refused([&] { x + torch::ones({4}); }));
  EXPECT_TRUE(is_refused([&] { x.add_(torch::ones({4})); }));
  EXPECT_TRUE(is_refused([&] { torch::mm(x.view({2, 2}), torch::ones({2, 2})); }));
  EXPECT_TRUE(is_refused([&] { x + torch::ones({4}, on(1)); }));
  EXPECT_TRUE(is_refused([&] { torch::ones({4}).add_(x); }));
  EXPECT_TRUE(is_refused([&] { x.index_select(0, torch::zeros({1}, at::kLong)); }));
  EXPECT_TRUE(same_bits(x.index({torch::zeros({2}, at::kLong)}), torch::ones({2})));
  EXPECT_TRUE(contains(error_text([&] { torch::mm(x.view({2, 2}), x.view({1, 4})); }), "shapes"));
}

TEST(SimDeviceKernels, OperatorsWhoseSizesDependOnDataMakeTheHostWait) {
  const auto sim = sim::use(4, 50us);
  const at::Tensor host = torch::tensor({0.0F, 2.0F, 0.0F, -1.0F});
  const at::Tensor x = host.to(sim::device(0));
  EXPECT_TRUE(sim::operators_that_waited().empty());
  EXPECT_TRUE(same_bits(x.nonzero(), host.nonzero()));
  EXPECT_TRUE(same_bits(x.masked_select(x > 0), host.masked_select(host > 0)));
  EXPECT_TRUE(same_bits(x.index({x > 0}), host.index({host > 0})));
  EXPECT_TRUE(same_bits(std::get<0>(at::_unique(x)), std::get<0>(at::_unique(host))));
  EXPECT_TRUE(torch::equal(x, x.clone()));
  at::Tensor out = torch::empty({0, 1}, on(0, at::kLong));
  at::nonzero_out(out, x);
  EXPECT_TRUE(same_bits(out, host.nonzero()));
  EXPECT_GE(sim::operators_that_waited().size(), 5u);
  at::Tensor sum = torch::empty({0}, on(0));
  at::add_out(sum, x, x);
  EXPECT_TRUE(same_bits(sum, host + host));
}

TEST(SimDeviceKernels, OperatorsOfOtherLibrariesRunOnce) {
  static std::atomic<int> calls;
  calls = 0;
  torch::Library library(torch::Library::DEF, "sim_test", std::nullopt, __FILE__, __LINE__);
  library.def("twice(Tensor x) -> Tensor");
  torch::Library on_cpu(torch::Library::IMPL, "sim_test", c10::DispatchKey::CPU, __FILE__,
                        __LINE__);
  on_cpu.impl("twice", [](const at::Tensor& x) {
    ++calls;
    return x * 2;
  });
  const auto sim = sim::use(1, 50us);
  const auto twice = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("sim_test::twice", "")
                         .typed<at::Tensor(const at::Tensor&)>();
  EXPECT_TRUE(same_bits(twice.call(torch::ones({3}, on(0))), torch::full({3}, 2.0F)));
  EXPECT_EQ(calls, 1);
}

TEST(SimDeviceKernels, RandomOperatorsDoNotDependOnDelays) {
  const auto draw = [](uint64_t seed) {
    const auto sim = sim::use(seed, 100us);
    torch::manual_seed(11);
    const at::Tensor x = torch::randn({50}, on(0)), ones = torch::ones({50}, on(0));
    return Tensors{x,
                   torch::rand({7}, on(0)),
                   torch::dropout(ones, 0.5, true),
                   torch::randperm(20, on(0, at::kLong)),
                   torch::randint(0, 9, {12}, on(0, at::kLong)),
                   torch::multinomial(ones, 5),
                   torch::bernoulli(ones * 0.5),
                   at::normal(x, 1.0),
                   torch::empty({30}, on(0)).exponential_(),
                   torch::randn({50}, on(0)) - x};
  };
  const Tensors first = draw(0);
  for (int seed = 1; seed < 5; ++seed) {
    const Tensors again = draw(seed);
    for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(same_bits(first[i], again[i])) << i;
  }
  EXPECT_GT(first.back().abs().sum().item<float>(), 1);  // two draws differ
}

TEST(SimDeviceKernels, GeneratorHasSeedAndState) {
  const auto sim = sim::use();
  at::Generator generator = at::globalContext().defaultGenerator(sim::device(1));
  EXPECT_EQ(generator.device(), sim::device(1));
  generator.set_current_seed(5);
  torch::randn({3}, on(1));
  const at::Tensor state = generator.get_state();
  const at::Tensor a = torch::randn({3}, on(1));
  generator.set_state(state);
  EXPECT_TRUE(same_bits(torch::randn({3}, on(1)), a));
  EXPECT_FALSE(same_bits(torch::randn({3}, on(1)), a));
  generator.set_current_seed(5);
  torch::randn({3}, on(1));
  EXPECT_TRUE(same_bits(torch::randn({3}, on(1)), a));
  at::Generator own = generator.clone();
  EXPECT_TRUE(same_bits(torch::randn({3}, own, on(1)), torch::randn({3}, on(1))));
  EXPECT_TRUE(
      contains(error_text([] { torch::randn({3}, at::detail::createCPUGenerator(), on(1)); }),
               "device type for generator"));
}

struct Case {
  std::string name;
  std::vector<std::vector<int64_t>> sizes;
  std::function<at::Tensor(const Tensors&)> run;
};

at::Tensor whole(const at::Tensor& like, int64_t count) {
  return (like.detach().abs() * 7).to(at::kLong).remainder(count);
}

std::vector<Case> cases() {
  using T = const Tensors&;
  const std::vector<int64_t> m{6, 8}, v{8};
  return {
      {"add", {m, v}, [](T t) { return torch::add(t[0], t[1], 2); }},
      {"sub", {m, m}, [](T t) { return t[0] - t[1]; }},
      {"mul", {m, v}, [](T t) { return t[0] * t[1]; }},
      {"div", {m, m}, [](T t) { return t[0] / (t[1] * t[1] + 1); }},
      {"pow", {m}, [](T t) { return t[0].pow(3); }},
      {"exp", {m}, [](T t) { return t[0].exp(); }},
      {"log", {m}, [](T t) { return (t[0].abs() + 1).log(); }},
      {"sqrt", {m}, [](T t) { return (t[0].abs() + 1).sqrt(); }},
      {"rsqrt", {m}, [](T t) { return (t[0].abs() + 1).rsqrt(); }},
      {"tanh", {m}, [](T t) { return t[0].tanh(); }},
      {"sigmoid", {m}, [](T t) { return t[0].sigmoid(); }},
      {"relu", {m}, [](T t) { return t[0].relu(); }},
      {"gelu", {m}, [](T t) { return torch::gelu(t[0]); }},
      {"gelu tanh", {m}, [](T t) { return torch::gelu(t[0], "tanh"); }},
      {"silu", {m}, [](T t) { return torch::silu(t[0]); }},
      {"leaky_relu", {m}, [](T t) { return torch::leaky_relu(t[0], 0.1); }},
      {"softplus", {m}, [](T t) { return torch::nn::functional::softplus(t[0]); }},
      {"clamp", {m}, [](T t) { return t[0].clamp(-0.5, 0.5); }},
      {"where", {m, m}, [](T t) { return torch::where(t[0] > t[1], t[0], t[1]); }},
      {"masked_fill", {m}, [](T t) { return t[0].masked_fill(t[0] > 0, -1); }},
      {"sum", {m}, [](T t) { return t[0].sum(); }},
      {"sum dim", {m}, [](T t) { return t[0].sum(0); }},
      {"mean", {m}, [](T t) { return t[0].mean(-1, true); }},
      {"var", {m}, [](T t) { return t[0].var(1); }},
      {"std", {m}, [](T t) { return t[0].std(); }},
      {"norm", {m}, [](T t) { return t[0].norm(2, 1); }},
      {"max", {m}, [](T t) { return std::get<0>(t[0].max(1)); }},
      {"amax", {m}, [](T t) { return t[0].amax(0); }},
      {"logsumexp", {m}, [](T t) { return t[0].logsumexp(1); }},
      {"cumsum", {m}, [](T t) { return t[0].cumsum(1); }},
      {"softmax", {m}, [](T t) { return t[0].softmax(-1); }},
      {"log_softmax", {m}, [](T t) { return t[0].log_softmax(-1); }},
      {"mm", {m, {8, 5}}, [](T t) { return t[0].mm(t[1]); }},
      {"mv", {m, v}, [](T t) { return t[0].mv(t[1]); }},
      {"bmm", {{2, 3, 4}, {2, 4, 5}}, [](T t) { return t[0].bmm(t[1]); }},
      {"matmul", {{2, 3, 4}, {4, 5}}, [](T t) { return t[0].matmul(t[1]); }},
      {"baddbmm",
       {{2, 3, 5}, {2, 3, 4}, {2, 4, 5}},
       [](T t) { return torch::baddbmm(t[0], t[1], t[2]); }},
      {"linear", {{2, 6, 8}, {5, 8}, {5}}, [](T t) { return torch::linear(t[0], t[1], t[2]); }},
      {"einsum",
       {{3, 4, 5}, {3, 5}},
       [](T t) {
         return torch::einsum("abc,ac->ab", {t[0], t[1]});
       }},
      {"layer_norm", {m, v, v}, [](T t) { return torch::layer_norm(t[0], {8}, t[1], t[2]); }},
      {"group_norm",
       {{2, 4, 5}, {4}, {4}},
       [](T t) { return torch::group_norm(t[0], 2, t[1], t[2]); }},
      {"batch_norm",
       {{6, 4}, {4}, {4}},
       [](T t) { return torch::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false); }},
      {"rms norm",
       {m, v},
       [](T t) { return t[0] * torch::rsqrt(t[0].square().mean(-1, true) + 1e-5) * t[1]; }},
      {"conv1d",
       {{2, 3, 9}, {4, 3, 3}, {4}},
       [](T t) { return torch::conv1d(t[0], t[1], t[2], 1, 1); }},
      {"conv2d",
       {{2, 3, 7, 7}, {4, 3, 3, 3}},
       [](T t) { return torch::conv2d(t[0], t[1], {}, 2, 1); }},
      {"conv_transpose2d",
       {{2, 3, 5, 5}, {3, 4, 3, 3}, {4}},
       [](T t) { return torch::conv_transpose2d(t[0], t[1], t[2]); }},
      {"max_pool2d", {{2, 3, 6, 6}}, [](T t) { return torch::max_pool2d(t[0], 2); }},
      {"avg_pool2d", {{2, 3, 6, 6}}, [](T t) { return torch::avg_pool2d(t[0], 2); }},
      {"interpolate",
       {{1, 2, 4, 4}},
       [](T t) {
         return torch::upsample_nearest2d(t[0], {8, 8});
       }},
      {"embedding", {{9, 4}, {6}}, [](T t) { return torch::embedding(t[0], whole(t[1], 9)); }},
      {"index_select", {m, v}, [](T t) { return t[0].index_select(0, whole(t[1], 6)); }},
      {"index", {m, v}, [](T t) { return t[0].index({whole(t[1], 6)}); }},
      {"index_put",
       {m, v},
       [](T t) { return t[0].index_put({whole(t[1], 6)}, t[1], /*accumulate=*/true); }},
      {"gather", {m}, [](T t) { return t[0].gather(1, whole(t[0], 8)); }},
      {"scatter_add", {m, m}, [](T t) { return t[0].scatter_add(1, whole(t[1], 8), t[1]); }},
      {"sort", {m}, [](T t) { return std::get<0>(t[0].sort(1)); }},
      {"topk", {m}, [](T t) { return std::get<0>(t[0].topk(3, 1)); }},
      {"cat",
       {m, m},
       [](T t) {
         return torch::cat({t[0], t[1]}, 1);
       }},
      {"stack",
       {m, m},
       [](T t) {
         return torch::stack({t[0], t[1]});
       }},
      {"chunk", {m}, [](T t) { return t[0].chunk(3, 1)[2] * 2; }},
      {"transpose", {m}, [](T t) { return t[0].t().contiguous(); }},
      {"permute",
       {{2, 3, 4}},
       [](T t) {
         return t[0].permute({2, 0, 1}).reshape({4, 6});
       }},
      {"expand",
       {v},
       [](T t) {
         return t[0].expand({6, 8}) * 2;
       }},
      {"slice", {m}, [](T t) { return t[0].slice(1, 1, 7, 2); }},
      {"narrow in place",
       {m},
       [](T t) {
         at::Tensor x = t[0] * 1;
         x.narrow(0, 1, 2).mul_(3);
         return x;
       }},
      {"tril", {m}, [](T t) { return t[0].tril(); }},
      {"flip", {m}, [](T t) { return t[0].flip(0); }},
      {"roll", {m}, [](T t) { return t[0].roll(2, 1); }},
      {"pad",
       {m},
       [](T t) {
         return torch::constant_pad_nd(t[0], {1, 2}, 0.5);
       }},
      {"unfold", {m}, [](T t) { return t[0].unfold(1, 3, 2); }},
      {"mse_loss", {m, m}, [](T t) { return torch::mse_loss(t[0], t[1]); }},
      {"smooth_l1", {m, m}, [](T t) { return torch::smooth_l1_loss(t[0], t[1]); }},
      {"cross_entropy",
       {m, {6}},
       [](T t) { return torch::cross_entropy_loss(t[0], whole(t[1], 8)); }},
      {"nll_loss",
       {m, {6}},
       [](T t) { return torch::nll_loss(t[0].log_softmax(1), whole(t[1], 8)); }},
      {"bce_with_logits",
       {m, m},
       [](T t) { return torch::binary_cross_entropy_with_logits(t[0], t[1].sigmoid()); }},
      {"attention",
       {{2, 2, 5, 4}, {2, 2, 5, 4}, {2, 2, 5, 4}},
       [](T t) {
         at::globalContext().setSDPUseFlash(false);  // the CPU's has other bits
         return torch::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true);
       }},
      {"lerp", {m, m}, [](T t) { return torch::lerp(t[0], t[1], 0.3); }},
      {"addcdiv",
       {m, m, m},
       [](T t) { return torch::addcdiv(t[0], t[1], t[2].square() + 1, 0.1); }},
      {"half", {m, {8, 5}}, [](T t) { return t[0].to(at::kBFloat16).mm(t[1].to(at::kBFloat16)); }},
      {"complex", {{6, 4, 2}}, [](T t) { return torch::view_as_complex(t[0]).abs(); }},
      {"fft", {m}, [](T t) { return torch::fft::rfft(t[0]).abs(); }},
      {"arange", {v}, [](T t) { return torch::arange(8, t[0].options()) * t[0]; }},
      {"eye", {m}, [](T t) { return torch::eye(6, t[0].options()).mm(t[0]); }},
      {"cholesky",
       {{4, 4}},
       [](T t) {
         return torch::linalg_cholesky(t[0].mm(t[0].t()) + 4 * torch::eye(4, t[0].options()));
       }},
  };
}

Tensors results_of(const Case& test, c10::Device device) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  Tensors inputs;
  for (const auto& sizes : test.sizes)
    inputs.push_back(torch::randn(sizes, generator).to(device).requires_grad_());
  const at::Tensor output = test.run(inputs);
  EXPECT_EQ(output.device(), device);
  const at::Tensor real = output.is_complex() ? at::view_as_real(output) : output;
  (real * torch::linspace(0.5, 2, real.numel()).to(device, real.scalar_type()).view(real.sizes()))
      .sum()
      .backward();
  Tensors results{output};
  for (const at::Tensor& input : inputs)
    results.push_back(input.grad().defined() ? input.grad() : torch::zeros({1}));
  return results;
}

TEST(SimDeviceKernels, OperatorsHaveTheBitsOfTheCpuForwardAndBackward) {
  for (const Case& test : cases()) {
    SCOPED_TRACE(test.name);
    const Tensors expected = results_of(test, c10::kCPU);
    for (const uint64_t seed : {0, 1}) {
      const auto sim = sim::use(seed, seed * 50us);
      const Tensors results = results_of(test, sim::device(0));
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(same_bits(results[i], expected[i])) << i;
      for (const std::string& waited : sim::operators_that_waited()) ADD_FAILURE() << waited;
    }
  }
}

TEST(SimDeviceKernels, ListsOfTensorsAndScalerOperatorsWork) {
  const auto run = [](c10::Device device) {
    Tensors list;
    for (int i = 1; i < 4; ++i) list.push_back(torch::full({i}, 0.5 * i).to(device));
    Tensors results = at::_foreach_mul(at::_foreach_add(list, list), 3);
    for (const at::Tensor& norm : at::_foreach_norm(list, 2)) results.push_back(norm);
    at::_foreach_addcdiv_(list, list, at::_foreach_exp(list), 0.5);
    at::Tensor found = torch::zeros({1}).to(device),
               growth = torch::zeros({1}, at::kInt).to(device);
    at::Tensor scale = torch::full({1}, 8.0F).to(device);
    at::_amp_foreach_non_finite_check_and_unscale_(list, found, torch::full({1}, 0.5F).to(device));
    at::_amp_update_scale_(scale, growth, found, 2, 0.5, 1);
    results.insert(results.end(), list.begin(), list.end());
    results.insert(results.end(), {found, growth, scale});
    return results;
  };
  const Tensors expected = run(c10::kCPU);
  const auto sim = sim::use(9, 50us);
  const Tensors results = run(sim::device(0));
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(results[i], expected[i])) << i;
}

struct Block : torch::nn::Module {
  Block()
      : tokens(torch::nn::EmbeddingOptions(11, 16)),
        norm1(torch::nn::LayerNormOptions({16})),
        norm2(torch::nn::LayerNormOptions({16})),
        qkv(16, 48),
        projection(16, 16),
        up(16, 64),
        down(64, 16),
        head(16, 11) {
    register_module("tokens", tokens);
    register_module("norm1", norm1);
    register_module("norm2", norm2);
    register_module("qkv", qkv);
    register_module("projection", projection);
    register_module("up", up);
    register_module("down", down);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& text) {
    at::Tensor x = tokens(text);
    const int64_t batch = x.size(0), length = x.size(1);
    const auto parts = qkv(norm1(x)).view({batch, length, 3, 2, 8}).permute({2, 0, 3, 1, 4});
    const at::Tensor mask = torch::ones({length, length}, x.options()).tril() == 0;
    const at::Tensor scores = parts[0].matmul(parts[1].transpose(-1, -2)) / std::sqrt(8.0);
    const at::Tensor seen = scores.masked_fill(mask, -1e9).softmax(-1).matmul(parts[2]);
    x = x + projection(seen.transpose(1, 2).reshape({batch, length, 16}));
    x = x + down(torch::gelu(up(norm2(x))));
    return head(x);
  }
  torch::nn::Embedding tokens;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, projection, up, down, head;
};

void fused_step(const Tensors& parameters, std::vector<Tensors>& state) {
  if (state.empty()) {
    state.resize(3);
    for (const at::Tensor& parameter : parameters) {
      state[0].push_back(torch::zeros_like(parameter));
      state[1].push_back(torch::zeros_like(parameter));
      state[2].push_back(torch::zeros({}, parameter.options()));
    }
  }
  Tensors grads;
  for (const at::Tensor& parameter : parameters) grads.push_back(parameter.grad());
  torch::NoGradGuard no_grad;
  at::_foreach_add_(state[2], 1);
  at::_fused_adamw_(parameters, grads, state[0], state[1], {}, state[2], 1e-2, 0.9, 0.999, 0.01,
                    1e-8, false, false);
}

// Losses and parameters after some steps.
template <class Model>
Tensors train(c10::Device device, bool is_fused, const at::Tensor& input,
              const at::Tensor& target) {
  torch::manual_seed(3);
  const auto model = std::make_shared<Model>();
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<Tensors> fused_state;
  Tensors results;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor logits = model->forward(input.to(device));
    const at::Tensor loss =
        torch::cross_entropy_loss(logits.flatten(0, -2), target.to(device).flatten());
    loss.backward();
    is_fused ? fused_step(model->parameters(), fused_state) : static_cast<void>(optimizer.step());
    results.push_back(loss);
  }
  for (const at::Tensor& parameter : model->parameters()) results.push_back(parameter);
  return results;
}

template <class Model>
void expect_cpu_bits(const at::Tensor& input, const at::Tensor& target) {
  for (const bool is_fused : {false, true}) {
    const Tensors expected = train<Model>(c10::kCPU, is_fused, input, target);
    for (int seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE(seed);
      const auto sim = sim::use(seed, 60us);
      const Tensors results = train<Model>(sim::device(seed % 4), is_fused, input, target);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(same_bits(results[i], expected[i])) << i;
      for (const std::string& waited : sim::operators_that_waited()) ADD_FAILURE() << waited;
    }
  }
}

struct Mlp : torch::nn::Module {
  Mlp() : first(6, 32), second(32, 5) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first, second;
};

TEST(SimDeviceTraining, MlpHasTheBitsOfTheCpu) {
  const at::Tensor x = torch::randn({7, 6});
  expect_cpu_bits<Mlp>(x, whole(x.select(1, 0), 5));
}

TEST(SimDeviceTraining, TransformerBlockHasTheBitsOfTheCpu) {
  const at::Tensor text = torch::randint(0, 11, {2, 6}, at::kLong);
  expect_cpu_bits<Block>(text, text.roll(-1, 1));
}

TEST(SimDeviceTraining, BackwardRunsOnTheStreamsOfForward) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    const auto sim = sim::use(seed, 100us);
    const c10::Stream side = side_stream();
    at::Tensor x = torch::full({64}, 2.0F, on(0)).requires_grad_();
    c10::Event ready(c10::kPrivateUse1), done(c10::kPrivateUse1);
    ready.record(current_stream());
    ready.block(side);
    at::Tensor y;
    {
      const c10::StreamGuard guard(side);
      y = x * x;
      done.record(side);
    }
    done.block(current_stream());
    (y * 3).sum().backward();
    EXPECT_TRUE(same_bits(x.grad(), torch::full({64}, 12.0F)));
  }
}

TEST(SimDeviceTraining, AutocastChoosesDtypes) {
  const auto sim = sim::use(1, 50us);
  const at::Tensor x = torch::randn({4, 4}, on(0)), h = torch::randn({4, 4});
  at::autocast::set_autocast_enabled(c10::kPrivateUse1, true);
  at::autocast::set_autocast_dtype(c10::kPrivateUse1, at::kBFloat16);
  const at::Tensor product = x.mm(x), softmax = product.softmax(1), other = h.mm(h);
  at::autocast::set_autocast_enabled(c10::kPrivateUse1, false);
  at::autocast::clear_cache();
  EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  EXPECT_EQ(softmax.scalar_type(), at::kFloat);
  EXPECT_EQ(other.scalar_type(), at::kFloat);
}

}  // namespace tessera::testing::sim_operators_test
