#pragma once

#include "checkpoint/index.h"

namespace tessera {

/// Throws `c10::ValueError`, naming the tensor, unless all numbers of its record are safe to
/// compute with: see `index_from_json()`. `check_whole()` checks that its chunks make up the
/// tensor.
void check_record(const TensorRecord& tensor, int world_size);

}  // namespace tessera
