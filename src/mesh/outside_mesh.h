#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <tessera/device_mesh.h>

#include <optional>

#include "mesh/op_plan.h"

namespace tessera {

/// An operator on DistTensors on a rank that is not in their mesh: pushes what the others get, with
/// the global sizes and dtypes and without data, so that one program runs on all ranks.
///
/// `plan` may be null. `results` keeps what was found out for later calls that have the same plan.
/// Throws `c10::NotImplementedError` for an operator that gives something else than tensors.
void call_outside(const c10::OperatorHandle& op, const DeviceMesh& mesh, const OpPlan* plan,
                  std::optional<torch::jit::Stack>& results, torch::jit::Stack* stack);

}  // namespace tessera
