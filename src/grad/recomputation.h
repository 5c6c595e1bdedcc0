#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/activation_checkpoint.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "grad/saved_tensors.h"
#include "grad/surroundings.h"

namespace tessera {

/// Returns how often a tensor was changed in place; 0 for tensors without a version count.
int64_t version_of(const at::Tensor& tensor);

/// Returns `'name': `; an empty string for an empty name.
std::string label_of(const std::string& name);

/// The properties of a tensor that do not depend on its values.
struct TensorLook {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::vector<int64_t> sizes;

  static TensorLook of(const at::Tensor& tensor);
  bool operator==(const TensorLook&) const = default;
};

/// A tensor that an operator saved for backward.
struct SavedTensor {
  at::Tensor data;            ///< without a graph
  int64_t version = 0;        ///< of `data` when it was saved
  int64_t leaf_version = -1;  ///< of a parameter or a view of one; -1 for all others
  TensorLook look;

  static SavedTensor of(const at::Tensor& tensor);
};

/// The tensors that a checkpoint's function saved for backward, and the means to recompute them.
///
/// Lives as long as the operators' nodes that saved tensors. See [Note: Recomputation] in
/// activation_checkpoint.cpp.
class Recomputation final : public SavedTensorSink,
                            public std::enable_shared_from_this<Recomputation> {
 public:
  using Tensors = detail::Tensors;
  using Rerun = detail::CheckpointRecording::Rerun;

  /// Must be constructed before the function's first run.
  Recomputation(std::string name, const Tensors& inputs, RandomState random, Rerun rerun);

  /// Called after the first run: from now on, the saved tensors come from running the function
  /// again.
  void drop_saved(const Tensors& outputs);

  /// Called if the first run failed: keeps the saved tensors, and releases the inputs.
  void abandon();

  std::unique_ptr<torch::autograd::SavedVariableHooks> next() override;
  /// Records a saved tensor, and returns the number by which `get()` returns it.
  size_t save(const at::Tensor& tensor);
  at::Tensor get(size_t number);

 private:
  using Saved = std::vector<SavedTensor>;

  at::Tensor take(SavedTensor& saved) const;
  void keep(Saved again, int backward);
  Saved run_again() const;
  Tensors detached_inputs() const;
  void check_saved(const Saved& again) const;
  void check_outputs(const Tensors& again) const;

  std::string name_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<bool> requires_grad_;  // per input
  RandomState random_;
  AutocastState autocast_;
  Rerun rerun_;

  // Backward may run on several threads, and the function may release one of our nodes.
  mutable std::recursive_mutex mutex_;
  bool dropped_ = false;
  Saved saved_;  // without data once they are dropped
  std::vector<TensorLook> outputs_;
  // By backward, which owns them: the tensors not yet handed out of the run made for it.
  std::map<int, std::weak_ptr<Saved>> again_;
};

}  // namespace tessera
