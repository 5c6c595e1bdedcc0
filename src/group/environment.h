#pragma once

#include <optional>
#include <string>

namespace tessera {

/// The value of an environment variable; nothing if it is unset or empty.
std::optional<std::string> environment(const char* name);

/// The same as a whole number. Throws `c10::ValueError` if it is something else.
std::optional<int> environment_number(const char* name);

}  // namespace tessera
