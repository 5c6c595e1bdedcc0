#pragma once

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <memory>

#include "engine/model/sharded_state.h"

namespace tessera::testing {

/// Odd sizes, a frozen layer, a tied parameter, one without elements, and one that each pass uses
/// twice. Computes in the dtype of its parameters.
struct PaperNet : torch::nn::Module {
  PaperNet()
      : in(register_module("in", torch::nn::Linear(13, 7))),
        frozen(register_module("frozen", torch::nn::Linear(7, 7))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})))),
        square(register_module("square", torch::nn::Linear(7, 7))),
        out(register_module("out", torch::nn::Linear(7, 301))),
        empty(register_parameter("empty", torch::zeros({0}))),
        tied(register_parameter("tied", in->weight)) {
    frozen->weight.requires_grad_(false);
    frozen->bias.requires_grad_(false);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::gelu(in(x.to(in->weight.dtype())));
    x = square(torch::gelu(square(norm(frozen(x)))));
    return out(torch::linear(torch::linear(x, tied.t()), tied)) + empty.sum();
  }

  torch::nn::Linear in, frozen;
  torch::nn::LayerNorm norm;
  torch::nn::Linear square, out;
  torch::Tensor empty, tied;
};

/// Blocks of equal layers; each is a unit if `units_of_blocks()` are the plan's units.
struct BlockNet : torch::nn::Module {
  BlockNet(int64_t width, int blocks, bool bias = true) {
    for (int i = 0; i < blocks; ++i) {
      const auto options = torch::nn::LinearOptions(width, width).bias(bias);
      layers.push_back(register_module("fc" + std::to_string(i), torch::nn::Linear(options)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<std::vector<std::string>> units_of_blocks() const {
    std::vector<std::vector<std::string>> units;
    for (size_t i = 0; i < layers.size(); ++i) {
      units.emplace_back();
      for (const auto& item : layers[i]->named_parameters())
        units.back().push_back("fc" + std::to_string(i) + "." + item.key());
    }
    return units;
  }
  std::vector<torch::nn::Linear> layers;
};

/// A sharded model with AdamW on its sharded, trainable parameters, one step after the other.
template <class N>
struct PaperJob {
  PaperJob(std::shared_ptr<N> made, const ShardPlan& plan)
      : net(std::move(made)), sharded(fully_shard(net, plan)) {
    std::vector<torch::Tensor> trainable;
    for (const auto& param : net->parameters())
      if (param.requires_grad() && sharded.state()->find(param)) trainable.push_back(param);
    inner = std::make_unique<torch::optim::AdamW>(trainable);
    optimizer = std::make_unique<ShardedOptimizer>(sharded, *inner);
  }
  void step(const torch::Tensor& x) {
    optimizer->zero_grad();
    net->forward(x).square().mean().backward();
    optimizer->step();
  }

  std::shared_ptr<N> net;
  Sharded<N> sharded;
  std::unique_ptr<torch::optim::Optimizer> inner;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

}  // namespace tessera::testing
