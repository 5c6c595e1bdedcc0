#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>

#include "mesh/dist_meta.h"

namespace tessera {

/// True if operators without a rule are errors on this thread.
bool is_strict();

/// Records that an operator used a parameter, for errors: this or a later operator belongs to the
/// parameter's module.
void note_parameter(const std::shared_ptr<const DistParameter>& parameter);

/// Throws `c10::NotImplementedError`; see `StrictOperators`.
[[noreturn]] void refuse_without_rule(const c10::OperatorHandle& op,
                                      at::ArrayRef<c10::IValue> arguments);

}  // namespace tessera
