#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

#include "mesh/dist_meta.h"

namespace tessera {

/// A call of an operator on lists of tensors: places the tensors at each position of the lists for
/// the operator, and writes changed values back afterwards.
class ListCall {
 public:
  struct Options {
    bool keeps_sums = false;    ///< sums pending in the tensors may stay pending
    bool needs_memory = false;  ///< kernels read memory as if it were contiguous
    bool writes_grads = true;   ///< an argument `grads` is written to if the schema says so
  };

  ListCall(const c10::OperatorHandle& op, torch::jit::Stack arguments, Options options);

  /// The number of tensors in a list.
  size_t size() const { return rows_.size(); }
  /// The placements at a position; null if all tensors there are ordinary.
  const DistSpecPtr& row(size_t i) const { return rows_[i]; }
  /// The tensor of the first list at a position.
  const at::Tensor& first(size_t i) const { return lists_[main_][i]; }
  /// False on a rank that is not in the mesh of the tensors at some position.
  bool is_member_of_all() const;
  /// True if all tensors at each position have equal sizes.
  bool has_equal_sizes() const;

  /// Runs the operator on local parts and returns its results. Values written to tensors that had
  /// to be placed anew are copied back to these.
  torch::jit::Stack run();

 private:
  // A tensor that is written to, and whose values the operator gets in other memory.
  struct Moved {
    at::Tensor tensor, part;
    DistSpecPtr spec;
  };

  DistSpecPtr find_row(size_t i) const;
  bool is_used(size_t i) const;
  void note_written(const at::Tensor& tensor, const at::Tensor& part, const DistSpecPtr& spec);
  at::Tensor local_element(const at::Tensor& tensor, size_t i, bool is_written);
  c10::IValue local_list(size_t argument);
  at::Tensor local_number(const at::Tensor& tensor, bool is_written);
  bool is_written(size_t argument) const;
  void write_back() const;

  const c10::OperatorHandle& op_;
  const torch::jit::Stack arguments_;
  const Options options_;
  std::vector<std::vector<at::Tensor>> lists_;  // by argument; empty for other arguments
  size_t main_ = 0;
  std::vector<DistSpecPtr> rows_;
  std::vector<Moved> moved_;
  std::vector<at::Tensor> written_;
};

}  // namespace tessera
