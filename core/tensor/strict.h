#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

#include "tensor/dist_meta.h"

namespace tessera {

/// True if operators without a rule are errors on this thread.
bool is_strict();

/// Records that an operator used a parameter, for errors: this or a later operator belongs to the
/// parameter's module.
void note_parameter(const std::shared_ptr<const DistParameter>& parameter);

/// Returns the dotted name of the module whose parameter an operator of this thread used last;
/// empty if there was none.
std::string last_module();

/// Must be called before an operator that every rank computes on whole tensors. Throws
/// `c10::NotImplementedError` if operators are strict, and warns otherwise: once for an operator, a
/// module, and placements.
void tell_without_rule(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments);

/// Must be called before an operator that needs shards of other ranks, and acts alike. `wanted`:
/// the placements that each tensor among the arguments gets.
void tell_gather(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                 const std::vector<DistSpecPtr>& wanted);

}  // namespace tessera
