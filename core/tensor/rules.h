#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <tessera/tensor/operator_rules.h>
#include <tessera/tensor/placement.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor/chunks.h"

namespace tessera {

/// The part of an input that this rank has: a range for each dim of the whole, of sizes `sizes`.
/// For a dim that is split, the range is that of a plain `Shard`.
struct LocalPart {
  std::vector<Range> box;
  std::vector<int64_t> sizes;
  bool is_contiguous = true;  ///< of the whole
};

/// Computes an operator on the local parts; `stack` holds them in place of the tensors. For an
/// operator that has to know the sizes of the whole tensors, or which part of them it gets. `parts`
/// has one for each input. Leaves the outputs in `stack`.
using LocalKernel = void (*)(const c10::OperatorHandle& op, const std::vector<LocalPart>& parts,
                             torch::jit::Stack& stack);

struct RuleEntry {
  std::string_view name;  ///< of the operator, without namespace; "view.dtype" for one overload
  Rule rule;
  OutputSizes sizes = nullptr;
  /// The argument that gives the size of the output: ranks pass the size of their own part.
  std::string_view size_argument = {};
  /// The output takes no values from the input: it is placed as the input is, if it has the same
  /// size, and is replicated otherwise. There is no `rule`.
  bool creates = false;
  /// Calls the operator on the local parts; if null, the operator is called as it is.
  LocalKernel local = nullptr;
  /// Each strategy also holds with all its `Shard`s split by one factor: along a dim that is cut,
  /// reordering the elements before the operator has the same effect as reordering them after it.
  bool splits = false;
  /// The output has the input's elements in their order: the local part is reshaped to the sizes of
  /// this rank's part of the output. The operator is not called, as it would see the sizes of the
  /// part.
  bool reshapes = false;
  /// `sizes` counts even where LibTorch can compute the operator on tensors without data: its
  /// function for these gives other sizes than the kernel, or refuses what the kernel takes.
  bool knows_sizes = false;
};

/// Returns an entry that `knows_sizes`.
constexpr RuleEntry with_known_sizes(std::string_view name, Rule rule, OutputSizes sizes) {
  return {.name = name, .rule = rule, .sizes = sizes, .knows_sizes = true};
}

/// A pending sum.
inline constexpr Partial kSum{PartialOp::kSum};

/// Returns the entries, with `splits` set also for those that have no local kernel.
template <size_t N>
constexpr std::array<RuleEntry, N> with_splits(const RuleEntry (&entries)[N]) {
  std::array<RuleEntry, N> result = std::to_array(entries);
  for (RuleEntry& entry : result) entry.splits |= !entry.local;
  return result;
}

/// Returns the placement of `input` (it broadcasts to `output`) if `output` is cut along `dim`: cut
/// alike, or whole if `input` has no such dim of that size.
Placement placed_under(const TensorInfo& input, int64_t dim, const TensorInfo& output);

/// Returns the same for all inputs.
Placements inputs_under(const OpCall& call, int64_t dim, const TensorInfo& output);

/// Returns placements of the inputs: this one for the first, `Replicate` for the others.
Placements first_placed(const OpCall& call, const Placement& placement);

/// Returns the strategy with all inputs and outputs cut along `dim`.
Strategy all_cut(const OpCall& call, int64_t dim);

/// Returns placements of the inputs: as given for the tensor arguments of these names, `Replicate`
/// for the others. Names that the operator does not have, and tensors that are undefined, are left
/// out.
Placements placed_by_name(const OpCall& call,
                          const std::vector<std::pair<std::string_view, Placement>>& given);

/// Returns the strategies that cut all tensors along a dim before the `spatial` last ones of the
/// argument `self`: batch and channels. Kernels support no empty parts.
Strategies before_spatial(const OpCall& call, int64_t spatial);
template <int64_t kSpatial>
Strategies before_spatial(const OpCall& call) {
  return before_spatial(call, kSpatial);
}

/// Returns an argument with a number for each of several dims, or one number for all.
int64_t stretched(const OpCall& call, std::string_view name, size_t dim);

/// Returns sizes of the first input with the pairs of this argument added. Pairs are for the last
/// dims, the last one first.
std::vector<TensorInfo> surrounded_sizes(const OpCall& call, std::string_view padding);

/// Returns strategies with all tensors cut along one dim that they have in common, other than the
/// argument `dim`, along which every rank needs all elements.
Strategies along_other_dims(const OpCall& call);

/// Returns the dims in the argument `dim`, in order; all dims if there is no such argument, and for
/// an empty list if `empty_is_all`.
std::vector<int64_t> named_dims(const c10::IValue* dim, int64_t ndim, bool empty_is_all = true);

/// Adds a strategy for each reduction operator: pending in all inputs, it stays pending in the
/// outputs.
void add_pending(Strategies& ways, const OpCall& call);
/// Adds them for sums and averages alone.
void add_sums(Strategies& ways, const OpCall& call);

/// Sizes of a single output, to which all inputs broadcast.
std::vector<TensorInfo> broadcast_sizes(const OpCall& call);

/// The output has the sizes of the first input, or of the second.
std::vector<TensorInfo> like_first(const OpCall& call);
std::vector<TensorInfo> like_second(const OpCall& call);
/// The output has the sizes of the argument `self`.
std::vector<TensorInfo> like_self(const OpCall& call);

/// The rules, by family.
std::span<const RuleEntry> elementwise_rules();
std::span<const RuleEntry> matrix_rules();
std::span<const RuleEntry> view_rules();
std::span<const RuleEntry> indexing_rules();
std::span<const RuleEntry> reduction_rules();
std::span<const RuleEntry> model_rules();
std::span<const RuleEntry> normalization_rules();
std::span<const RuleEntry> convolution_rules();
std::span<const RuleEntry> loss_rules();
std::span<const RuleEntry> attention_rules();
std::span<const RuleEntry> spatial_rules();
std::span<const RuleEntry> linear_algebra_rules();

/// Adds the rule of an operator, by its name with its namespace.
void add_rule(const std::string& name, Rule rule, const RuleOptions& options);

/// Returns the rule of an operator: that of the overload, or else of the name; null if it has none.
const RuleEntry* find_rule(const c10::FunctionSchema& schema);

}  // namespace tessera
