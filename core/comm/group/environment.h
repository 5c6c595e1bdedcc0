#pragma once

#include <initializer_list>
#include <optional>
#include <string>

namespace tessera {

/// Returns the value of the first of these environment variables that is set and not empty.
std::optional<std::string> environment(std::initializer_list<const char*> names);
inline std::optional<std::string> environment(const char* name) {
  return environment(std::initializer_list<const char*>{name});
}

/// Returns the same as an integer. Throws `c10::ValueError` if the value is not one.
std::optional<int> environment_number(const char* name);

}  // namespace tessera
