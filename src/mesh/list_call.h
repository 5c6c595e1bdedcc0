#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

#include "mesh/dist_meta.h"

namespace tessera {

/// A call of an operator on lists of tensors: how the tensors at each place are placed for it, and
/// what becomes of them afterwards.
class ListCall {
 public:
  struct Options {
    bool keeps_sums = false;    ///< sums pending in the tensors may stay so
    bool needs_memory = false;  ///< kernels read memory as if it were contiguous
    bool writes_grads = true;   ///< an argument `grads` is written to as the schema says
  };

  ListCall(const c10::OperatorHandle& op, torch::jit::Stack arguments, Options options);

  /// How many tensors a list has.
  size_t size() const { return rows_.size(); }
  /// The placements at a place; null if there are ordinary tensors only.
  const DistSpecPtr& row(size_t i) const { return rows_[i]; }
  /// A tensor of the first list.
  const at::Tensor& first(size_t i) const { return lists_[main_][i]; }
  /// False on a rank that is not in the mesh of the tensors at some place.
  bool is_member_of_all() const;
  /// True if all tensors at each place have equal sizes.
  bool has_equal_sizes() const;

  /// Runs the operator on local parts, and returns its results. Writes to tensors that had to be
  /// placed anew go back to them.
  torch::jit::Stack run();

 private:
  // A tensor that is written to whose values the operator is given in other memory.
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
