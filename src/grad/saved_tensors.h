#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera {

/// Somebody who takes what autograd saves for backward.
class SavedTensorSink {
 public:
  virtual ~SavedTensorSink() = default;
  /// Called for each tensor that is saved: the hooks that get it, and give it back.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> next() = 0;
};

/// While it lives, `sink` takes what is saved on this thread, and no scope around it does.
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
