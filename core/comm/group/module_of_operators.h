#pragma once

#include <string>

namespace tessera {

/// Sets the function that tells `CommDebug` to which module the collectives of this thread belong,
/// by its dotted name, or by an empty one. Operators on DistTensors set it.
void set_module_of_operators(std::string (*module)());

}  // namespace tessera
