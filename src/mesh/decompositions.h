#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <span>
#include <string_view>
#include <vector>

#include "mesh/dist_meta.h"

namespace tessera {

// [Note: Decompositions]
//
// Of some operators the ranks have neither parts nor terms of the result, if they call them on
// parts of the arguments: the mean over a batch that is cut unevenly, say. A decomposition computes
// such a call by other operators on DistTensors, or by operators on the local parts and a reduction
// between them. It is asked before a plan is made, and declines where the plan does as well.

/// Computes the call whose arguments are on `stack`, and puts the results in their place; or
/// returns false and leaves `stack` alone.
using Decomposition = bool (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

struct DecompositionEntry {
  std::string_view name;  ///< of the operator, without namespace and overload
  Decomposition decompose;
};

/// The decompositions, by family.
std::span<const DecompositionEntry> loss_decompositions();
std::span<const DecompositionEntry> reduction_decompositions();
std::span<const DecompositionEntry> batch_norm_decompositions();

/// The decomposition of an operator named with its namespace; null if it has none.
Decomposition find_decomposition(std::string_view name);

/// Registers other forms of operators that LibTorch composes, but not always of operators alone.
/// Once in a process.
void register_composites();

/// The arguments of a call, by name.
class NamedArguments {
 public:
  NamedArguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  /// Null if the operator has no argument of this name.
  const c10::IValue* find(std::string_view name) const;
  /// Throws if the operator has none.
  const c10::IValue& operator[](std::string_view name) const;
  /// Undefined if the argument is.
  at::Tensor tensor(std::string_view name) const;
  /// A copy, with the arguments of these names replaced.
  torch::jit::Stack with(
      const std::vector<std::pair<std::string_view, c10::IValue>>& replaced) const;
  /// True if a tensor among the arguments is sharded.
  bool any_cut() const;
  /// True if a tensor among the arguments is sharded or a pending reduction.
  bool any_not_whole() const;

 private:
  bool any_placement(bool (*holds)(const Placement&)) const;

  const c10::FunctionSchema& schema_;
  at::ArrayRef<c10::IValue> values_;
};

/// Puts `results` in the place of the arguments of `op`; true.
bool finish(const c10::OperatorHandle& op, torch::jit::Stack& stack,
            const std::vector<at::Tensor>& results);

/// The dtype that sums of `dtype` are made in: float for shorter ones.
at::ScalarType sum_dtype(at::ScalarType dtype);

}  // namespace tessera
