#pragma once

#include <ATen/core/Generator.h>
#include <tessera/device_mesh.h>

#include <string>

namespace tessera {

/// Throws `c10::ValueError` on all ranks of `mesh` unless their generators are in the same state,
/// naming the ranks whose state differs; `subject` names the operator that draws. Collective on
/// the first call of a thread for a mesh and a generator; later calls do nothing.
void check_generators_agree(const DeviceMesh& mesh, at::Generator generator,
                            const std::string& subject);

}  // namespace tessera
