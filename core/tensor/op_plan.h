#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <utility>
#include <vector>

#include "tensor/dist_meta.h"
#include "tensor/rules.h"

namespace tessera {

/// How an operator is computed for one combination of shapes and placements.
struct OpPlan {
  struct Output {
    DistSpecPtr spec;
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;  ///< of a view: its start, relative to that of its base
  };
  /// Per tensor among the arguments: its placements during the call.
  std::vector<DistSpecPtr> inputs;
  std::vector<Output> outputs;
  /// Indices, in order, of the results that an `output_mask` leaves out: kernels may return them
  /// nevertheless, on tensors without data or with it.
  std::vector<size_t> unwanted;
  /// Indices, in order, of the inputs that every rank has whole to compute parts of the outputs:
  /// their gradients arrive as terms.
  std::vector<size_t> whole_inputs;
  /// Arguments that are replaced by values that suit the local part.
  std::vector<std::pair<size_t, c10::IValue>> arguments;
  /// The local part is reshaped to these sizes in place of a call. Its layout may differ from that
  /// of the whole: a view of it may have to be a copy.
  std::optional<std::vector<int64_t>> reshape;
  /// Indices, in order, of the inputs whose shards other ranks need: they are gathered.
  std::vector<size_t> gathered_inputs;
  bool is_view = false;        ///< results are views of the first argument
  bool writes = false;         ///< writes to one of its arguments
  bool reads_strides = false;  ///< gets parts in any layout; see [Note: Layouts of parts]
  /// See `RuleEntry::local`; null where the operator is called as it is.
  LocalKernel local = nullptr;
  /// Per tensor among the arguments, for `local`: the part of it that this rank has.
  std::vector<LocalPart> parts;
};

/// Makes the plan of a call whose tensors are on `mesh`; nullopt if the operator has no rule, or if
/// each of its strategies would move a tensor that it writes to.
std::optional<OpPlan> plan_op(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                              const DeviceMesh& mesh);

/// True if the operator's results are views.
bool returns_views(const c10::FunctionSchema& schema);

/// True if the operator's plans don't depend on the real numbers among its arguments.
bool ignores_reals(const c10::FunctionSchema& schema);

/// True for a leaf that requires a gradient, and for a view of one.
bool shows_parameter(const at::Tensor& tensor);

}  // namespace tessera
