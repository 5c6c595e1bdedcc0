#include "comm/group/environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>

namespace tessera {

std::optional<std::string> environment(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* const value = std::getenv(name);
    if (value && value[0] != '\0') return value;
  }
  return std::nullopt;
}

std::optional<int> environment_number(const char* name) {
  const auto text = environment(name);
  if (!text) return std::nullopt;
  int number = 0;
  const char* const end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, number);
  TORCH_CHECK_VALUE(error == std::errc() && stop == end, "[init] ", name,
                    " must be a whole number; got ", name, "=", *text);
  return number;
}

}  // namespace tessera
