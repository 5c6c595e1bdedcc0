#pragma once

#include "engine/unit/layout.h"

namespace tessera {

/// Moves the version counter of a tensor, and that of its part if it is a DistTensor, because its
/// values are changed by other means than an operator: a backward that needs the old values throws.
void note_write(const at::Tensor& tensor);

/// Does so for the tensors of a parameter.
void note_write(const ParamSlot& slot);

}  // namespace tessera
