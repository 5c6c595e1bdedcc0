#include "benchmarks/optim_steps.h"

#include <tessera/engine/cpu_adam.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/sharded_optimizer.h>
#include <torch/torch.h>

#include <memory>
#include <utility>

namespace tessera::tools {
namespace {

using torch::Tensor;

constexpr double kRate = 1e-3, kDecay = 0.01;

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, Tensor param) {
  if (name == "cpu_adam")
    return std::make_unique<CPUAdam>(std::vector<Tensor>{std::move(param)},
                                     CPUAdamOptions(kRate).weight_decay(kDecay));
  return std::make_unique<torch::optim::AdamW>(
      std::vector<Tensor>{std::move(param)},
      torch::optim::AdamWOptions(kRate).weight_decay(kDecay));
}

Tensor random(int64_t elements, at::ScalarType dtype) {
  return torch::randn({elements}, torch::dtype(torch::kFloat)).to(dtype);
}

std::function<void()> fused_adamw(Tensor param) {
  const Tensor exp_avg = torch::zeros_like(param), exp_avg_sq = torch::zeros_like(param);
  return [=, step = 0.0]() mutable {
    torch::NoGradGuard no_grad;
    torch::_fused_adamw_({param}, {param.grad()}, {exp_avg}, {exp_avg_sq}, {},
                         {torch::full({}, ++step, torch::kFloat)}, kRate, 0.9, 0.999, kDecay, 1e-8,
                         /*amsgrad=*/false, /*maximize=*/false, std::nullopt, std::nullopt);
  };
}

OptimStep plain_step(const std::string& optimizer, at::ScalarType dtype, int64_t elements) {
  Tensor param = random(elements, dtype);
  param.mutable_grad() = random(elements, dtype);
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t state_item = optimizer == "cpu_adam" ? 4 : item;
  // Reads four tensors, writes three.
  const int64_t bytes = 3 * item + 4 * state_item;
  if (optimizer == "fused_adamw") return {bytes, fused_adamw(param)};
  std::shared_ptr<torch::optim::Optimizer> own = make_optimizer(optimizer, param);
  return {bytes, [own] { own->step(); }};
}

struct OneParameter : torch::nn::Module {
  explicit OneParameter(int64_t elements)
      : weight(register_parameter("weight", random(elements, torch::kBFloat16))) {}
  Tensor weight;
};

OptimStep master_step(const std::string& optimizer, int64_t elements) {
  const auto net = std::make_shared<OneParameter>(elements);
  std::shared_ptr<torch::optim::Optimizer> inner = make_optimizer(optimizer, net->weight);
  const auto sharded = fully_shard(net, {.precision = {.master_dtype = torch::kFloat}});
  const auto own = std::make_shared<ShardedOptimizer>(
      sharded, *inner, ShardedOptimizerOptions{.fused = optimizer != "adamw"});
  (net->weight * random(elements, torch::kBFloat16)).sum().backward();
  // As for `fp32`, and the parameter is written, too.
  return {7 * 4 + 2, [net, inner, own] { own->step(); }};
}

}  // namespace

OptimStep make_optim_step(const std::string& optimizer, const std::string& dtype,
                          int64_t elements) {
  if (dtype == "master") return master_step(optimizer, elements);
  return plain_step(optimizer, dtype == "fp32" ? torch::kFloat : torch::kBFloat16, elements);
}

}  // namespace tessera::tools
