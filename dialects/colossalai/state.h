#pragma once

#include <tessera/dialects/colossalai.h>
#include <tessera/trace/memory_tracer.h>

#include <memory>
#include <optional>
#include <vector>

#include "init/origin.h"

namespace tessera::colossalai::detail {

/// The contexts that a parameter was made in. It remembers them.
struct ParamOrigin final : Origin {
  using Made = std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>;

  at::Device device = at::kCPU;
  ShardStrategyPtr strategy;
  ZeroInitOptions options;  ///< `shard_param`: of this parameter
  bool is_replicated = true;
  std::shared_ptr<Made> made;  ///< all tensors made in the context; null: it does not count them

  void on_made(const at::Tensor& tensor) const override {
    if (made) made->emplace_back(tensor.getIntrusivePtr());
  }
  /// Returns the origin of the innermost context on this thread, or null.
  static std::shared_ptr<const ParamOrigin> current() {
    return std::dynamic_pointer_cast<const ParamOrigin>(OriginScope::current());
  }
};

/// The scale of the loss behind the gradients that wait for the step.
enum class LossScale : uint8_t { kUnknown, kOne, kScaled };

struct ModelState {
  ShardedModelV2Options options;
  ShardedModule sharded;
  LossScale loss_scale = LossScale::kUnknown;
  std::optional<MemoryTracer> tracer = std::nullopt;

  /// Called before a backward. Throws if gradients of another scale are waiting.
  void begin_backward(LossScale scale);
  bool has_gradients() const;
};

/// Shards a module that was built in a context. Collective. Throws `c10::ValueError` if it was not,
/// and for options that don't fit.
ModelState make_state(torch::nn::Module& module, const ShardStrategyPtr& strategy,
                      const ShardedModelV2Options& options);

}  // namespace tessera::colossalai::detail
