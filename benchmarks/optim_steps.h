#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::tools {

/// An optimizer step that can be repeated.
struct OptimStep {
  int64_t bytes_per_element;  ///< bytes that it must read and write, each once
  std::function<void()> run;
};

/// A step of `optimizer` (`cpu_adam`, `fused_adamw`, `adamw`) on one parameter with a gradient:
/// - `fp32`: parameter, gradient and state in fp32;
/// - `bf16`: parameter and gradient in bf16; state in fp32 for `cpu_adam`, in bf16 for the others;
/// - `master`: `ShardedOptimizer`, which steps fp32 masters and rounds them to a bf16 parameter.
OptimStep make_optim_step(const std::string& optimizer, const std::string& dtype, int64_t elements);

}  // namespace tessera::tools
