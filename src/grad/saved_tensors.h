#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera {

/// Receives the tensors that autograd saves for backward.
class SavedTensorSink {
 public:
  virtual ~SavedTensorSink() = default;
  /// Called for each tensor that is saved: returns the hooks that store it and return it.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> next() = 0;
};

/// While it lives, `sink` receives the tensors saved on this thread, and the scopes around it do
/// not.
///
/// See [Note: Hooks without Python] in saved_tensors.cpp.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensorSink* sink);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  SavedTensorSink* outer_;
};

}  // namespace tessera
