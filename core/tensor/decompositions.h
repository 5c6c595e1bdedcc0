#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <span>
#include <string_view>
#include <vector>

#include "tensor/dist_meta.h"
#include "tensor/rules.h"

namespace tessera {

// [Note: Decompositions]
//
// For some operators, calls on parts of the arguments give neither parts nor terms of the result:
// the mean over a batch that is cut unevenly, for example. A decomposition computes such a call by
// other operators on DistTensors, or by operators on the local parts and a reduction between them.
// It is tried before a plan is made, and declines where a plan does as well. Ranks that are not in
// the mesh decompose the same calls, and so learn the placements of the results: these decide later
// who sends what, also between meshes.

/// Computes the call whose arguments are on `stack`, and replaces them by the results; or returns
/// false and leaves `stack` unchanged.
using Decomposition = bool (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

struct DecompositionEntry {
  std::string_view name;  ///< of the operator, without namespace and overload
  Decomposition decompose;
};

/// The decompositions, by family.
std::span<const DecompositionEntry> loss_decompositions();
std::span<const DecompositionEntry> reduction_decompositions();
std::span<const DecompositionEntry> batch_norm_decompositions();
std::span<const DecompositionEntry> view_decompositions();
std::span<const DecompositionEntry> embedding_bag_decompositions();
std::span<const DecompositionEntry> mask_decompositions();

/// Returns the decomposition of an operator named with its namespace; null if it has none.
const DecompositionEntry* find_decomposition(std::string_view name);

/// Registers replacements for composite operators of LibTorch that do more than call other
/// operators. Must be called once in a process.
void register_composites();

/// A call that may be decomposed.
struct DecomposedCall : NamedArguments {
  DecomposedCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : NamedArguments{op.schema(), torch::jit::last(stack, op.schema().arguments().size())} {}

  /// Returns an undefined tensor if the argument is undefined.
  at::Tensor tensor(std::string_view name) const;
  /// Returns a copy of the arguments, with those of these names replaced.
  torch::jit::Stack with(
      const std::vector<std::pair<std::string_view, c10::IValue>>& replaced) const;
  /// True if a tensor among the arguments is sharded.
  bool any_cut() const;
  /// True if a tensor among the arguments is sharded or a pending reduction.
  bool any_not_whole() const;

 private:
  bool any_placement(bool (*holds)(const Placement&)) const;
};

/// Replaces the arguments of `op` by `results`; returns true.
bool finish(const c10::OperatorHandle& op, torch::jit::Stack& stack,
            const std::vector<at::Tensor>& results);

/// True if `tensor` is a DistTensor that is cut along `dim`.
bool is_cut_along(const at::Tensor& tensor, int64_t dim);

/// Returns the dtype in which sums of `dtype` are computed: float for shorter ones.
at::ScalarType sum_dtype(at::ScalarType dtype);

}  // namespace tessera
