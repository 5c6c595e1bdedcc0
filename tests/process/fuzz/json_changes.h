#pragma once

#include <nlohmann/json.hpp>

#include "support/draw.h"

namespace tessera::testing {

/// Changes a few values of `json`, wherever they are: to edges of numbers, other types, deep
/// nesting; removes, repeats and exchanges parts.
void change_json(nlohmann::json& json, Draw& draw);

/// Returns a value that fits no place in which one is expected.
nlohmann::json odd_value(Draw& draw);

}  // namespace tessera::testing
