#pragma once

#include "checkpoint/chunk_reader.h"
#include "checkpoint/index.h"

namespace tessera {

/// Ties tensors that other tools stored once for each of their names: one that is in no param group
/// of the index's optimizer, and has the dtype, the shape and the bits of a parameter that is in
/// one, becomes a further name of it. (An optimizer has a tied parameter once.) Reads the tensors
/// of such dtypes and shapes. Memory: two tensors.
void tie_copies(CheckpointIndex& index, ChunkReader& reader);

}  // namespace tessera
