#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace tessera {

/// Returns the states of this rank's default generators, by device type.
std::map<std::string, at::Tensor> read_random_state();
/// Sets the generators that `state` contains. Throws `c10::ValueError` for an invalid state.
void write_random_state(const std::map<std::string, at::Tensor>& state);

}  // namespace tessera
