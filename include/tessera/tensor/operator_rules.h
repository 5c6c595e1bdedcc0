#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <tessera/export.h>
#include <tessera/tensor/placement.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A tensor as a rule sees it: the global sizes and, for inputs, the dtype.
struct TensorInfo {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  ///< also of outputs whose dtype is unknown
  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
};

/// The arguments of a call, by name.
struct TESSERA_API NamedArguments {
  const c10::FunctionSchema& schema;
  at::ArrayRef<c10::IValue> values;

  /// Returns the argument of this name; null if the operator does not have one.
  const c10::IValue* find(std::string_view name) const;
  /// Returns the argument of this name; throws if the operator does not have one.
  const c10::IValue& argument(std::string_view name) const;
};

/// A call of an operator as a rule sees it.
struct TESSERA_API OpCall : NamedArguments {
  std::vector<TensorInfo> inputs;  ///< all defined tensors among the arguments, in order
  std::vector<int> first_input;    ///< per argument: the index of its first tensor among `inputs`
  std::vector<TensorInfo> outputs;
  int64_t ranks = 1;  ///< along the mesh dim; of the whole mesh for a dim that several cut

  /// Returns the index among `inputs` of the tensor argument of this name; -1 if it is undefined.
  int input(std::string_view name) const;
  /// Returns those of `all`, one for each output, that the argument `output_mask` asks for.
  template <class T>
  std::vector<T> wanted(const std::vector<T>& all) const {
    const auto mask = argument("output_mask").toBoolList();
    std::vector<T> some;
    for (size_t i = 0; i < all.size(); ++i) {
      if (mask[i]) some.push_back(all[i]);
    }
    return some;
  }
  /// True if every rank gets some of `size` elements: kernels may not support empty parts.
  bool reaches_all(int64_t size) const { return (ranks - 1) * ((size + ranks - 1) / ranks) < size; }
  /// Returns a dim argument, wrapped to be non-negative.
  int64_t dim(std::string_view name, int64_t ndim) const;
};

/// One way to compute along one mesh dim: with inputs of these placements, the operator on each
/// rank's local parts yields parts of outputs of those placements.
struct Strategy {
  Placements inputs;
  Placements outputs;
  bool can_split = true;  ///< false: an exception from `RuleEntry::splits`
};
using Strategies = std::vector<Strategy>;

/// Returns the strategies that an operator allows along one mesh dim, from shapes and arguments
/// alone. Replicating everything is always allowed and need not be listed.
using Rule = Strategies (*)(const OpCall&);

/// Returns the sizes of the outputs; needed where LibTorch can't compute the operator on meta
/// tensors.
using OutputSizes = std::vector<TensorInfo> (*)(const OpCall&);

struct RuleOptions {
  OutputSizes sizes = nullptr;
  /// The argument that gives the size of the output, if there is one: ranks pass the size of their
  /// own part.
  std::string size_argument;
  /// Each strategy also holds for parts that consist of several blocks (`Shard::split_factor`):
  /// along a dim that is cut, reordering the elements before the operator has the same effect as
  /// reordering them after it.
  bool splits = false;
};

/// Tells how an operator, such as `"mine::scaled_tanh"`, is computed on DistTensors from the parts
/// that ranks have; without a rule every rank computes it on whole tensors, and operators that are
/// not LibTorch's can't be called at all. The strategies that send least are chosen.
///
/// Must be called on all ranks before the operator meets a DistTensor, once in a process, from one
/// thread. The operator must be defined, with a kernel for the device or a
/// `CompositeExplicitAutograd` one; a composite without one arrives as its parts and needs no rule.
/// Gradients work if the operator's autograd kernel calls operators that have rules.
/// Throws `c10::ValueError` if there is no such operator, or if it has a rule already.
TESSERA_API void register_rule(const std::string& name, Rule rule, const RuleOptions& options = {});

}  // namespace tessera
