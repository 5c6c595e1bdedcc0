#pragma once

#include <ATen/core/Generator.h>
#include <tessera/device_mesh.h>

#include <string>

namespace tessera {

/// Throws `c10::ValueError` on all ranks of `mesh` unless their generators are in one state, naming
/// those whose differs; `subject` is who wants to draw. Collective on the first call of a thread
/// for a mesh and a generator; later ones do nothing.
void check_generators_agree(const DeviceMesh& mesh, at::Generator generator,
                            const std::string& subject);

}  // namespace tessera
