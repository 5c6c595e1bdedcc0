#pragma once

#include <tessera/dialects/colossalai.h>
#include <tessera/memory_tracer.h>

#include <memory>
#include <optional>
#include <vector>

#include "init/origin.h"

namespace tessera::colossalai::detail {

/// What a parameter remembers of the contexts that it was made in.
struct ParamOrigin final : Origin {
  using Made = std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>;

  at::Device device = at::kCPU;
  ShardStrategyPtr strategy;
  ZeroInitOptions options;
  bool is_sharded = false;
  bool is_replicated = true;
  std::shared_ptr<Made> made;  ///< all tensors that the context counts; null: it counts none

  void on_made(const at::Tensor& tensor) const override;

  /// That of the innermost context on this thread, or null.
  static std::shared_ptr<const ParamOrigin> current();
};

/// The ranks that a module is to be sharded over.
ProcessGroupPtr group_of(const torch::nn::Module& module, const ShardedModelV2Options& options);

/// The plan of a module that was built in a context. Throws `c10::ValueError` for another, and for
/// options that don't fit. Not collective.
ShardPlan plan_of(const torch::nn::Module& module, const ShardStrategyPtr& strategy,
                  const ShardedModelV2Options& options);

/// How the gradients that wait for the step were made.
enum class LossScale : uint8_t { kUnknown, kOne, kScaled };

struct ModelState {
  ShardedModelV2Options options;
  ShardedModule sharded;
  LossScale loss_scale = LossScale::kUnknown;
  std::optional<MemoryTracer> tracer = std::nullopt;

  /// Before a backward: throws if gradients wait that were scaled otherwise.
  void begin_backward(LossScale scale);
  bool has_gradients() const;
};

}  // namespace tessera::colossalai::detail
