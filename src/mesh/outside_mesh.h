#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <tessera/device_mesh.h>

#include <optional>

#include "mesh/op_plan.h"

namespace tessera {

/// Calls an operator on DistTensors on a rank that is not in their mesh: pushes the results that
/// the ranks of the mesh get, with the global sizes and dtypes but without data, so that one
/// program runs on all ranks.
///
/// `plan` may be null. `results` caches the results for later calls that have the same plan. Throws
/// `c10::NotImplementedError` for an operator that returns values other than tensors.
void call_outside(const c10::OperatorHandle& op, const DeviceMesh& mesh, const OpPlan* plan,
                  std::optional<torch::jit::Stack>& results, torch::jit::Stack* stack);

}  // namespace tessera
