#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace tessera {

/// Returns true if this thread is in a `DeferredInit` scope.
bool in_deferred_init();

/// Runs an operator that is no view and has no parameter of a unit among its arguments. In a
/// `DeferredInit` scope, records it; elsewhere, first gives its deferred arguments their values.
/// `below`: the dispatch keys after `kUnitKey`.
void call_deferred(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                   torch::jit::Stack* stack);

/// Settles all deferred tensors among `arguments`: see `DeferredStorage::settle()`.
void settle(c10::ArrayRef<c10::IValue> arguments);

}  // namespace tessera
