#pragma once

#include <optional>
#include <string>

namespace tessera {

/// Returns the value of an environment variable; `nullopt` if it is unset or empty.
std::optional<std::string> environment(const char* name);

/// Returns the same as an integer. Throws `c10::ValueError` if the value is not one.
std::optional<int> environment_number(const char* name);

}  // namespace tessera
