#pragma once

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <functional>

namespace tessera {

/// A layer that passes its input on. Programs hang into it whatever should happen in the middle of
/// a forward or of a backward.
struct TrapImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& input) {
    if (in_forward) in_forward();
    if (in_backward && input.requires_grad()) {
      input.register_hook([call = in_backward](const torch::Tensor&) { call(); });
    }
    return input;
  }

  std::function<void()> in_forward, in_backward;
};
TORCH_MODULE(Trap);

/// A model of several units with its optimizer; a step takes a few milliseconds.
struct Training {
  explicit Training(int64_t width = 256) : hidden(width) {}

  torch::Tensor loss() { return model->forward(torch::randn({16, 64})).square().mean(); }

  int64_t hidden;
  Trap trap;
  torch::nn::Sequential model{
      torch::nn::Linear(64, hidden),  torch::nn::GELU(), trap,
      torch::nn::Linear(hidden, 256), torch::nn::GELU(), torch::nn::Linear(256, 8)};
  ShardedModule sharded = fully_shard(model, {.unit_bytes = 64 * 1024});
  torch::optim::AdamW adamw{model->parameters(), torch::optim::AdamWOptions(1e-3)};
  ShardedOptimizer optimizer{sharded, adamw};
};

}  // namespace tessera
