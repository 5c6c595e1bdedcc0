#pragma once

#include <string>
#include <utility>
#include <vector>

#include "interop/pickle_machine.h"

namespace tessera {

/// Returns the tensors of a pickled dict by name, in its order; those of dicts in it as
/// `OUTER.INNER`. Leaves out values that are no tensors.
///
/// Throws `c10::ValueError` for any other value; see [Note: Reading a pickle].
std::vector<std::pair<std::string, PickledTensor>> named_tensors(const Pickle& pickle);

}  // namespace tessera
