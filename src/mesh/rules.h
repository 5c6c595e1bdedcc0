#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <tessera/placement.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A tensor as a rule sees it: the global sizes, and of inputs the dtype.
struct TensorInfo {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  ///< undefined for outputs
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

struct RuleEntry {
  std::string_view name;  ///< of the operator, without namespace and overload
  Rule rule;
  OutputSizes sizes = nullptr;
  /// The argument that says how large the output is: ranks give their own part's size.
  std::string_view size_argument = {};
  /// The output has nothing of the input's values: it lies where the input does, if it has its
  /// size, and is replicated otherwise. There is no `rule`.
  bool creates = false;
};

/// Where `input`, which broadcasts to `output`, lies if that is cut along `dim`: cut alike, or
/// whole if it has no such dim of that size.
Placement placed_under(const TensorInfo& input, int64_t dim, const TensorInfo& output);

/// All tensors cut along one dim that they have in common, other than the argument `dim`, along
/// which every rank needs all elements.
Strategies along_other_dims(const OpCall& call);

/// Adds that a reduction by any operator, pending in all inputs, stays so in the outputs.
void add_pending(Strategies& ways, const OpCall& call);

/// Sizes of one output: what all inputs broadcast to.
std::vector<TensorInfo> broadcast_sizes(const OpCall& call);

/// The rules, by family.
std::span<const RuleEntry> elementwise_rules();
std::span<const RuleEntry> matrix_rules();
std::span<const RuleEntry> view_rules();
std::span<const RuleEntry> reduction_rules();
std::span<const RuleEntry> model_rules();

/// The rule of an operator; null if it has none.
const RuleEntry* find_rule(std::string_view name);

}  // namespace tessera
