#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string_view>

#include "mesh/dist_meta.h"

namespace tessera {

/// Returns the local part of `tensor` after its placements are changed to those of `wanted`, on the
/// same mesh; an ordinary tensor counts as replicated. Collective over the mesh.
at::Tensor placed(const at::Tensor& tensor, const DistSpec& wanted, std::string_view subject);

/// Returns the mesh of the DistTensors among an operator's arguments, of which there must be one at
/// least.
///
/// Throws `c10::ValueError` if they are on several meshes, or together with an ordinary tensor that
/// requires a gradient.
const DeviceMesh& mesh_of_arguments(const c10::OperatorHandle& op,
                                    at::ArrayRef<c10::IValue> arguments);

/// Returns the device of an operator's tensors; the CPU if it has none.
c10::Device device_of(at::ArrayRef<c10::IValue> arguments);

/// Returns the index of the argument that `result` is, if it is one that is written to; else
/// nullopt.
std::optional<size_t> written_index(const c10::FunctionSchema& schema, size_t result);
/// Returns that argument itself, or null.
const c10::IValue* written_argument(const c10::FunctionSchema& schema, size_t result,
                                    at::ArrayRef<c10::IValue> arguments);

}  // namespace tessera
