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

/// How often a tensor was changed in place; 0 where nobody counts.
int64_t version_of(const at::Tensor& tensor);

/// `'name': `, or nothing.
std::string label_of(const std::string& name);

/// What can be told of a tensor without its values.
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
  int64_t version = 0;        ///< of `data`, as it was saved
  int64_t leaf_version = -1;  ///< of a parameter or a view of one; -1 for all others
  TensorLook look;

  static SavedTensor of(const at::Tensor& tensor);
};

/// What a checkpoint's function saved, and the way to get it once more.
///
/// Lives as long as the operators' nodes that saved something. See [Note: Recomputation] in
/// activation_checkpoint.cpp.
class Recomputation final : public SavedTensorSink,
                            public std::enable_shared_from_this<Recomputation> {
 public:
  using Tensors = detail::Tensors;
  using Rerun = detail::CheckpointRecording::Rerun;

  /// Before the function runs first.
  Recomputation(std::string name, const Tensors& inputs, RandomState random, Rerun rerun);

  /// After it has run first: from now on, what it saved comes from running it again.
  void drop_saved(const Tensors& outputs);

  /// If it failed: what it saved stays, and its inputs are let go.
  void abandon();

  std::unique_ptr<torch::autograd::SavedVariableHooks> next() override;
  /// The number of a saved tensor, by which to get it.
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

  // Backward may run on several threads, and the function may let go of one of our nodes.
  mutable std::recursive_mutex mutex_;
  bool dropped_ = false;
  Saved saved_;  // once dropped, without data
  std::vector<TensorLook> outputs_;
  // By backward, which owns them: what is left of a run for it.
  std::map<int, std::weak_ptr<Saved>> again_;
};

}  // namespace tessera
