#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <tessera/placement.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mesh/chunks.h"

namespace tessera {

/// A tensor as a rule sees it: the global sizes, and of inputs the dtype.
struct TensorInfo {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  ///< so of outputs, if nothing tells
  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
};

/// A call of an operator as a rule sees it.
struct OpCall {
  const c10::FunctionSchema& schema;
  std::span<const c10::IValue> arguments;
  std::vector<TensorInfo> inputs;  ///< all defined tensors among the arguments, in order
  std::vector<int> first_input;    ///< per argument: its first among `inputs`
  std::vector<TensorInfo> outputs;
  int64_t ranks = 1;  ///< of the whole mesh

  /// The argument of this name; null if the operator does not have one.
  const c10::IValue* find(std::string_view name) const;
  /// The same; throws for one that the operator does not have.
  const c10::IValue& argument(std::string_view name) const;
  /// Index among `inputs` of the tensor argument of this name; -1 if it is undefined.
  int input(std::string_view name) const;
  /// Those of `all`, one for each output, that the argument `output_mask` asks for.
  template <class T>
  std::vector<T> wanted(const std::vector<T>& all) const {
    const auto mask = argument("output_mask").toBoolList();
    std::vector<T> some;
    for (size_t i = 0; i < all.size(); ++i) {
      if (mask[i]) some.push_back(all[i]);
    }
    return some;
  }
  /// True if every rank gets some of `size` elements: kernels may not bear empty parts.
  bool reaches_all(int64_t size) const { return (ranks - 1) * ((size + ranks - 1) / ranks) < size; }
  /// A dim argument, not negative.
  int64_t dim(std::string_view name, int64_t ndim) const;
};

/// One way to compute along one mesh dim: with inputs placed like this on each rank, the operator
/// on the local parts gives parts of the outputs that are placed like that.
struct Strategy {
  Placements inputs;
  Placements outputs;
};
using Strategies = std::vector<Strategy>;

/// What an operator allows along one mesh dim, from shapes and arguments alone. That everything may
/// be replicated goes without saying.
using Rule = Strategies (*)(const OpCall&);

/// The sizes of the outputs; needed where LibTorch can't compute the operator on meta tensors.
using OutputSizes = std::vector<TensorInfo> (*)(const OpCall&);

/// Which part of an input this rank has: a range for each dim of the whole, which has `sizes`.
struct LocalPart {
  std::vector<Range> box;
  std::vector<int64_t> sizes;
};

/// Computes an operator on the local parts, which `stack` holds in place of the tensors: for one
/// that has to know how large they are, or which part of the whole. `parts` has one for each input.
/// Leaves the outputs in `stack`.
using LocalKernel = void (*)(const c10::OperatorHandle& op, const std::vector<LocalPart>& parts,
                             torch::jit::Stack& stack);

struct RuleEntry {
  std::string_view name;  ///< of the operator, without namespace; "view.dtype" for one overload
  Rule rule;
  OutputSizes sizes = nullptr;
  /// The argument that says how large the output is: ranks give their own part's size.
  std::string_view size_argument = {};
  /// The output has nothing of the input's values: it lies where the input does, if it has its
  /// size, and is replicated otherwise. There is no `rule`.
  bool creates = false;
  /// What calls the operator on the local parts; without it the operator is called as it is.
  LocalKernel local = nullptr;
  /// Each way also holds with all its `Shard`s split by one factor: along a dim that is cut, the
  /// operator does to elements in any order what it does to them in order.
  bool splits = false;
  /// The output has the input's elements in their order: the local part gets the sizes of its place
  /// in the output, and the operator is not called. It would see the sizes of the part.
  bool reshapes = false;
};

/// A sum that is pending.
inline constexpr Partial kSum{PartialOp::kSum};

/// The entries, with `splits` for those that have no local kernel.
template <size_t N>
constexpr std::array<RuleEntry, N> with_splits(const RuleEntry (&entries)[N]) {
  std::array<RuleEntry, N> result = std::to_array(entries);
  for (RuleEntry& entry : result) entry.splits = !entry.local;
  return result;
}

/// Where `input`, which broadcasts to `output`, lies if that is cut along `dim`: cut alike, or
/// whole if it has no such dim of that size.
Placement placed_under(const TensorInfo& input, int64_t dim, const TensorInfo& output);

/// Placements of the inputs: as given for the tensor arguments of these names, `Replicate` for the
/// others. Names that the operator does not have, and tensors that are undefined, are left out.
Placements placed_by_name(const OpCall& call,
                          const std::vector<std::pair<std::string_view, Placement>>& given);

/// All tensors cut along one dim that they have in common, other than the argument `dim`, along
/// which every rank needs all elements.
Strategies along_other_dims(const OpCall& call);

/// The dims in the argument `dim`, in order: all of them if it names none.
std::vector<int64_t> named_dims(const c10::IValue* dim, int64_t ndim);
/// The same; all of them only if there is no such argument: an empty list names none.
std::vector<int64_t> listed_dims(const c10::IValue* dim, int64_t ndim);

/// Adds that a reduction by any operator, pending in all inputs, stays so in the outputs.
void add_pending(Strategies& ways, const OpCall& call);

/// Sizes of one output: what all inputs broadcast to.
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

/// The rule of an operator: that of the overload, or else of the name; null if it has none.
const RuleEntry* find_rule(const c10::FunctionSchema& schema);

}  // namespace tessera
