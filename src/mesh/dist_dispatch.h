#pragma once

namespace tessera {

/// Registers the operators of LibTorch for DistTensors. Called wherever a DistTensor is made; only
/// the first call has an effect.
void register_dist_operators();

}  // namespace tessera
