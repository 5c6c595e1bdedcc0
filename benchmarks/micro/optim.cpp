// Bytes per second of optimizer steps, beside a triad. The bytes are those that the computation
// must read and write, each counted once.

#include <tessera/base/page_heap.h>
#include <tessera/engine/cpu_adam.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/sharded_optimizer.h>
#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "benchmarks/seconds.h"
#include "rounds.h"

namespace tessera::micro {
namespace {

using torch::Tensor;

// As STREAM counts them: without the lines that a cache reads because they are about to be
// overwritten; with them it would be 4 * 4. The step overwrites data that it has read.
constexpr double kTriadBytes = 3 * 4;
constexpr double kRate = 1e-3, kDecay = 0.01;

/// An optimizer step that can be repeated.
struct Step {
  int64_t bytes_per_element;
  std::function<void()> run;
};

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        const Tensor& param) {
  if (name == "cpu_adam")
    return std::make_shared<CPUAdam>(std::vector<Tensor>{param},
                                     CPUAdamOptions(kRate).weight_decay(kDecay));
  return std::make_shared<torch::optim::AdamW>(
      std::vector<Tensor>{param}, torch::optim::AdamWOptions(kRate).weight_decay(kDecay));
}

Tensor random(int64_t elements, at::ScalarType dtype) { return torch::randn(elements).to(dtype); }

std::function<void()> fused_adamw(Tensor param) {
  const Tensor exp_avg = torch::zeros_like(param), exp_avg_sq = torch::zeros_like(param);
  return [=, step = 0.0]() mutable {
    torch::NoGradGuard no_grad;
    torch::_fused_adamw_({param}, {param.grad()}, {exp_avg}, {exp_avg_sq}, {},
                         {torch::full({}, ++step, torch::kFloat)}, kRate, 0.9, 0.999, kDecay, 1e-8,
                         /*amsgrad=*/false, /*maximize=*/false, std::nullopt, std::nullopt);
  };
}

Step plain_step(const std::string& optimizer, at::ScalarType dtype, int64_t elements) {
  Tensor param = random(elements, dtype);
  param.mutable_grad() = random(elements, dtype);
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t state_item = optimizer == "cpu_adam" ? 4 : item;
  // Reads four tensors, writes three.
  const int64_t bytes = 3 * item + 4 * state_item;
  if (optimizer == "fused_adamw") return {bytes, fused_adamw(param)};
  return {bytes, [own = make_optimizer(optimizer, param)] { own->step(); }};
}

struct OneParameter : torch::nn::Module {
  explicit OneParameter(int64_t elements)
      : weight(register_parameter("weight", random(elements, torch::kBFloat16))) {}
  Tensor weight;
};

/// `ShardedOptimizer` over fp32 masters that it rounds to a bf16 parameter.
Step master_step(const std::string& optimizer, int64_t elements) {
  const auto net = std::make_shared<OneParameter>(elements);
  const auto inner = make_optimizer(optimizer, net->weight);
  const auto sharded = fully_shard(net, {.precision = {.master_dtype = torch::kFloat}});
  const auto own = std::make_shared<ShardedOptimizer>(
      sharded, *inner, ShardedOptimizerOptions{.fused = optimizer != "adamw"});
  (net->weight * random(elements, torch::kBFloat16)).sum().backward();
  // As for `fp32`, and the parameter is written, too.
  return {7 * 4 + 2, [net, inner, own] { own->step(); }};
}

Step make_step(const std::string& optimizer, const std::string& dtype, int64_t elements) {
  if (dtype == "master") return master_step(optimizer, elements);
  return plain_step(optimizer, dtype == "fp32" ? torch::kFloat : torch::kBFloat16, elements);
}

Round rounds_of(const Step& step, int64_t elements) {
  const Tensor a = torch::zeros(elements), b = torch::ones(elements), c = torch::ones(elements);
  return [=]() -> Numbers {
    const auto gb_per_s = [&](double bytes, const std::function<void()>& run) {
      return 1e-9 * bytes * static_cast<double>(elements) / seconds_of(run);
    };
    const double triad = gb_per_s(kTriadBytes, [&] {
      Tensor sum = a;
      torch::add_out(sum, b, c, 0.5);
    });
    const auto bytes = static_cast<double>(step.bytes_per_element);
    const double own = gb_per_s(bytes, step.run);
    return {{"bytes_per_element", bytes},
            {"triad_gb_per_s", triad},
            {"step_gb_per_s", own},
            {"ratio", own / triad},
            {"ratio_with_write_allocate", own / triad * 3 / 4}};
  };
}

}  // namespace

void add_optim(const Options& options) {
  for (const std::string optimizer : {"cpu_adam", "fused_adamw", "adamw"}) {
    for (const std::string dtype : {"fp32", "bf16", "master"}) {
      add_rounds("optim/" + optimizer + "/" + dtype, [=, elements = options.elements] {
        use_page_heap();
        return rounds_of(make_step(optimizer, dtype, elements), elements);
      });
    }
  }
}

}  // namespace tessera::micro
