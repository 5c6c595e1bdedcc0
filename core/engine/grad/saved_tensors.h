#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

namespace tessera {

/// While it lives, each tensor that autograd saves on this thread, or in a backward that it runs,
/// gets hooks that `make` returns, and none of the scopes around it: they store the tensor and
/// return it.
///
/// See [Note: Hooks without Python] in saved_tensors.cpp.
class SavedTensorScope {
 public:
  using MakeHooks = std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;

  explicit SavedTensorScope(MakeHooks make);
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  const MakeHooks make_;
  c10::DebugInfoGuard scope_;
};

}  // namespace tessera
