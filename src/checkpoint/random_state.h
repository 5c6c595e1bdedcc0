#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace tessera {

/// The states of the generators that this rank draws from when it names none, by device type.
std::map<std::string, at::Tensor> read_random_state();
/// Sets those that are there. Throws `c10::ValueError` for what is no state.
void write_random_state(const std::map<std::string, at::Tensor>& state);

}  // namespace tessera
