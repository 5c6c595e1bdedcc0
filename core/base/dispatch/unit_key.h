#pragma once

#include <c10/core/DispatchKey.h>

namespace tessera {

/// The dispatch key of parameters of units and of deferred tensors. LibTorch reserves it for
/// libraries like this one and does not use it. See [Note: Access through the dispatcher] in
/// access/fallback.cpp.
constexpr c10::DispatchKey kUnitKey = c10::DispatchKey::DeferredInit;

}  // namespace tessera
