#pragma once

namespace tessera {

/// Has the operators of LibTorch know DistTensors. Called by whoever makes one; works once.
void register_dist_operators();

}  // namespace tessera
