#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// Has the operators of LibTorch know DistTensors. Called by whoever makes one; works once.
void register_dist_operators();

/// Gives gradients of `leaf` its own placements as they come, so that they are reduced once.
void place_gradients(const at::Tensor& leaf);

}  // namespace tessera
