#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <tessera/tensor/device_mesh.h>

#include <string>

namespace tessera {

/// Returns the generator from which operators on tensors of `device` draw on the calling rank by
/// default.
at::Generator generator_on(c10::Device device);

/// Throws `c10::ValueError` on all ranks of `mesh`, naming ranks, unless their generators are in
/// the same state. Collective on the first call of a thread for a mesh and a generator; later calls
/// do nothing, and so do ranks that are not in the mesh.
void check_generators_agree(const DeviceMesh& mesh, at::Generator generator,
                            const std::string& subject);

}  // namespace tessera
