#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

/// The layers of drawn models.
namespace tessera::differential {

/// Defines something, and its source as a text.
#define WITH_SOURCE(name, ...) \
  __VA_ARGS__                  \
  inline constexpr auto name = #__VA_ARGS__;

// clang-format off
/// Maps rows of `w` numbers to rows of as many.
WITH_SOURCE(kBlockSource, struct Block : torch::nn::Module {
  explicit Block(int64_t width) : w(width) {}
  virtual torch::Tensor forward(torch::Tensor x) = 0;
  virtual void tie(Block& other) {}
  torch::Tensor param(const std::vector<int64_t>& sizes) {
    return register_parameter("p" + std::to_string(count++), torch::randn(sizes) * 0.5);
  }
  const int64_t w;
  int count = 0;
};)
// clang-format on

/// Makes a layer of a width.
using MakeBlock = std::function<std::shared_ptr<Block>(int64_t width)>;
/// By the name of the class.
inline std::map<std::string, MakeBlock>& block_classes() {
  static std::map<std::string, MakeBlock> classes;
  return classes;
}
/// What the classes have in their braces.
inline std::map<std::string, std::string>& block_sources() {
  static std::map<std::string, std::string> sources;
  return sources;
}

#define DRAWN_BLOCK(Name, ...)                                \
  struct Name : Block {                                       \
    using Block::Block;                                       \
    __VA_ARGS__                                               \
  };                                                          \
  inline const bool k##Name##IsKnown =                        \
      block_sources().insert({#Name, #__VA_ARGS__}).second && \
      block_classes().insert({#Name, [](int64_t w) { return std::make_shared<Name>(w); }}).second;

// clang-format off
namespace blocks {

using torch::Tensor;
namespace nn = torch::nn;

DRAWN_BLOCK(Linear,
  nn::Linear fc = register_module("fc", nn::Linear(w, w));
  Tensor forward(Tensor x) override { return fc(x); })
DRAWN_BLOCK(NoBias,
  nn::Linear fc = register_module("fc", nn::Linear(nn::LinearOptions(w, w).bias(false)));
  Tensor forward(Tensor x) override { return fc(x); })
DRAWN_BLOCK(Narrow,
  nn::Linear down = register_module("down", nn::Linear(w, 1));
  nn::Linear up = register_module("up", nn::Linear(1, w));
  Tensor forward(Tensor x) override { return up(torch::tanh(down(x))); })
DRAWN_BLOCK(Conv1d,
  nn::Conv1d conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(1, 2, 3).padding(1)));
  Tensor forward(Tensor x) override { return conv(x.unsqueeze(1)).sum(1); })
DRAWN_BLOCK(Conv2d,
  nn::Conv2d conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 3, {1, 3}).padding({0, 1})));
  Tensor forward(Tensor x) override { return conv(x.view({-1, 1, 1, w})).mean(1).flatten(1); })
DRAWN_BLOCK(LayerNorm,
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({w})));
  Tensor forward(Tensor x) override { return norm(x); })
DRAWN_BLOCK(GroupNorm,
  nn::GroupNorm norm = register_module("norm", nn::GroupNorm(1, w));
  Tensor forward(Tensor x) override { return norm(x); })
DRAWN_BLOCK(BatchNorm,
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(w));
  Tensor forward(Tensor x) override { return norm(x); })
DRAWN_BLOCK(Embedding,
  nn::Embedding table = register_module("table", nn::Embedding(5, w));
  Tensor forward(Tensor x) override { return x + table(x.detach().select(1, 0).abs().mul(3).to(torch::kLong) % 5); })
DRAWN_BLOCK(Lstm,
  nn::LSTM lstm = register_module("lstm", nn::LSTM(w, w));
  Tensor forward(Tensor x) override { return std::get<0>(lstm(x.unsqueeze(0))).squeeze(0); })
DRAWN_BLOCK(Gru,
  nn::GRU gru = register_module("gru", nn::GRU(w, w));
  Tensor forward(Tensor x) override { return std::get<0>(gru(x.unsqueeze(1))).squeeze(1); })
DRAWN_BLOCK(GruCell,
  nn::GRUCell cell = register_module("cell", nn::GRUCell(w, w));
  Tensor forward(Tensor x) override { return cell(x, cell(x)); })
DRAWN_BLOCK(Attention,
  nn::MultiheadAttention attention = register_module("attention", nn::MultiheadAttention(w, 1));
  Tensor forward(Tensor x) override { x = x.unsqueeze(1); return std::get<0>(attention(x, x, x)).squeeze(1); })
DRAWN_BLOCK(Bilinear,
  nn::Bilinear mix = register_module("mix", nn::Bilinear(w, w, w));
  Tensor forward(Tensor x) override { return mix(x, torch::tanh(x)); })
DRAWN_BLOCK(PRelu,
  nn::PReLU act = register_module("act", nn::PReLU(nn::PReLUOptions().num_parameters(w)));
  Tensor forward(Tensor x) override { return act(x); })
DRAWN_BLOCK(Gelu,
  Tensor forward(Tensor x) override { return torch::gelu(x); })
DRAWN_BLOCK(ReluInPlace,
  Tensor forward(Tensor x) override { Tensor y = x.mul(1.5); return torch::relu_(y); })
DRAWN_BLOCK(Dropout,
  nn::Dropout drop = register_module("drop", nn::Dropout(0.25));
  Tensor forward(Tensor x) override { return drop(x); })
DRAWN_BLOCK(Nested,
  nn::Sequential stack = register_module("stack", nn::Sequential(nn::Linear(w, 2 * w), nn::Tanh(), nn::Linear(2 * w, w)));
  nn::ModuleList list = register_module("list", nn::ModuleList(stack, nn::Linear(w, w)));
  Tensor forward(Tensor x) override { return stack->forward(list[1]->as<nn::Linear>()->forward(x)); })
DRAWN_BLOCK(OddShape,
  Tensor p = param({3, 1, w, 1, 2});
  Tensor forward(Tensor x) override { return x * p.sum({0, 1, 3}).select(1, 1) + p[2][0].select(1, 0).t().reshape({-1}).narrow(0, 1, 1); })
DRAWN_BLOCK(Scalar,
  Tensor p = param({});
  Tensor forward(Tensor x) override { return x * p; })
DRAWN_BLOCK(Empty,
  Tensor p = param({0, 3});
  Tensor q = param({w});
  Tensor forward(Tensor x) override { return x * q + p.sum(); })
DRAWN_BLOCK(Transposed,
  Tensor p = register_parameter("p", torch::randn({w, w}).t() / 2);
  Tensor forward(Tensor x) override { return x.matmul(p); })
DRAWN_BLOCK(Tied,
  Tensor p;
  void tie(Block& other) override { p = register_parameter("p", other.parameters()[0]); }
  Tensor forward(Tensor x) override { return x.matmul(p); })
DRAWN_BLOCK(Buffered,
  Tensor p = param({w});
  Tensor mean = register_buffer("mean", torch::zeros({w}));
  Tensor forward(Tensor x) override {
    if (is_training()) { torch::NoGradGuard no_grad; mean.lerp_(x.mean(0).to(mean.scalar_type()), 0.5); }
    return x * p + mean.detach().clone().to(x.scalar_type());
  })
DRAWN_BLOCK(Custom,
  struct Scale : torch::autograd::Function<Scale> {
    static Tensor forward(torch::autograd::AutogradContext* context, Tensor x, Tensor p) { context->save_for_backward({x, p}); return x * p; }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context, torch::autograd::tensor_list grads) {
      const auto saved = context->get_saved_variables();
      return {grads[0] * saved[1], (grads[0] * saved[0]).sum(0)};
    }
  };
  Tensor p = param({w});
  Tensor forward(Tensor x) override { return Scale::apply(x, p); })
DRAWN_BLOCK(TwoOfMany,
  nn::ParameterList list = register_module("list", nn::ParameterList(torch::randn({w}), torch::randn({w}), torch::randn({w})));
  Tensor forward(Tensor x) override { return x * (*list)[0] + (*list)[2]; })

}  // namespace blocks
// clang-format on

}  // namespace tessera::differential
