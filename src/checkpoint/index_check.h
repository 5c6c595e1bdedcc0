#pragma once

#include "checkpoint/index.h"

namespace tessera {

/// Throws `c10::ValueError`, naming the tensor, unless all numbers of its record can be counted
/// with: see `index_from_json()`. Whether its chunks are the whole tensor is asked by
/// `check_whole()`.
void check_record(const TensorRecord& tensor, int world_size);

}  // namespace tessera
