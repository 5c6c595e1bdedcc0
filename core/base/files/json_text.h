#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/files/untrusted.h"

namespace tessera {

// JSON from untrusted sources: the index of a checkpoint, the header of a safetensors file, the
// index of a Hugging Face model directory. These functions throw `c10::ValueError` or
// `nlohmann::json::exception`; see `naming_file()`.

/// Parses a text. Refuses nesting deeper than any of ours: copying and printing values recurse.
nlohmann::json parse_json(std::string_view text);

/// Returns a whole number from `least` to `most`; `what` names it in the error.
int64_t whole_number(const nlohmann::json& value, const char* what, int64_t least = 0,
                     int64_t most = std::numeric_limits<int64_t>::max());
std::vector<int64_t> whole_numbers(const nlohmann::json& values, const char* what);

/// Returns the members of an object by name. `read` converts each value.
template <class F>
auto named_values(const nlohmann::json& object, F&& read) {
  TORCH_CHECK_VALUE(object.is_object(), "values by name are expected; got ", object.type_name());
  std::map<std::string, decltype(read(object))> values;
  for (const auto& [name, value] : object.items()) values.emplace(name, read(value));
  return values;
}

/// Most bytes of a message that may quote the file's text.
constexpr size_t kMostShown = 1000;

/// Calls `f`, and prefixes its errors with the function, the file and `expected`, such as "must be
/// the index of a checkpoint".
template <class F>
auto naming_file(const char* function, const std::string& path, const char* expected, F&& f) {
  try {
    return f();
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "[", function, "] '", path, "' ", expected, ": ",
                      shortened(error.what(), kMostShown));
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "[", function, "] '", path, "' ", expected, ": ",
                      shortened(error.what_without_backtrace(), kMostShown));
  }
}

}  // namespace tessera
