#include "base/files/json_text.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr int kMostJsonDepth = 64;

// Returns the nesting depth of the text that a parser reads; at least that if it is no JSON. (A
// parser callback could count, too, but makes it scan all members of an object for each of them.)
int depth_of(std::string_view text) {
  int depth = 0, most = 0;
  bool is_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (is_string && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      is_string = !is_string;
    } else if (!is_string && (text[i] == '[' || text[i] == '{')) {
      most = std::max(most, ++depth);
    } else if (!is_string && (text[i] == ']' || text[i] == '}')) {
      --depth;
    }
  }
  return most;
}

}  // namespace

nlohmann::json parse_json(std::string_view text) {
  TORCH_CHECK_VALUE(depth_of(text) <= kMostJsonDepth, "its JSON must nest at most ", kMostJsonDepth,
                    " deep");
  return nlohmann::json::parse(text);
}

int64_t whole_number(const nlohmann::json& value, const char* what, int64_t least, int64_t most) {
  // The parser makes numbers that are not negative unsigned, up to 2^64.
  const bool is_too_large =
      value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(most);
  TORCH_CHECK_VALUE(value.is_number_integer() && !is_too_large && value.get<int64_t>() >= least &&
                        value.get<int64_t>() <= most,
                    what, " must be a whole number from ", least, " to ", most, "; got ",
                    shortened(value.dump()));
  return value.get<int64_t>();
}

std::vector<int64_t> whole_numbers(const nlohmann::json& values, const char* what) {
  TORCH_CHECK_VALUE(values.is_array(), what, " must be a list of whole numbers; got ",
                    values.type_name());
  std::vector<int64_t> numbers;
  for (const auto& value : values) numbers.push_back(whole_number(value, what));
  return numbers;
}

}  // namespace tessera
