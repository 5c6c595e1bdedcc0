#pragma once

#include <c10/core/Device.h>

#include "tensor/shard_mesh.h"

namespace tessera {

/// Throws `c10::ValueError` on all ranks if they are not connected for tensors of an accelerator
/// that has their parameters, or if two of them have theirs on the same one: its backend connects
/// devices, and two ranks on one would wait for each other.
/// `device`: that of this rank's parameters, of one type on all ranks. Collective, unless that is
/// the host.
void check_devices(const ShardMesh& mesh, c10::Device device);

}  // namespace tessera
