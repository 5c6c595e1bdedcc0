#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string_view>

#include "mesh/dist_meta.h"

namespace tessera {

/// The local part of `tensor` after its placements are changed to those of `wanted`, on the same
/// mesh; an ordinary tensor counts as replicated. Collective over the mesh.
at::Tensor placed(const at::Tensor& tensor, const DistSpec& wanted, std::string_view subject);

/// The mesh of the DistTensors among an operator's arguments, of which there is one at least.
///
/// Throws `c10::ValueError` if they lie on several meshes, or together with an ordinary tensor that
/// requires a gradient.
const DeviceMesh& mesh_of_arguments(const c10::OperatorHandle& op,
                                    at::ArrayRef<c10::IValue> arguments);

/// The device of an operator's tensors; the CPU if it has none.
c10::Device device_of(at::ArrayRef<c10::IValue> arguments);

/// Of a result that is an argument written to: the index of that argument. None for other results.
std::optional<size_t> written_index(const c10::FunctionSchema& schema, size_t result);
/// The same: that argument, or null.
const c10::IValue* written_argument(const c10::FunctionSchema& schema, size_t result,
                                    at::ArrayRef<c10::IValue> arguments);

}  // namespace tessera
