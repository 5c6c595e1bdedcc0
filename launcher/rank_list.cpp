#include "launcher/rank_list.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::tools {
namespace {

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

}  // namespace

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += fmt::format("{}{}", last == i + 1 ? ", " : "-", ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string one_line(std::string_view text, size_t width) {
  std::string line;
  size_t characters = 0, end_of_short = 0;
  for (const char byte : text) {
    if (begins_character(byte)) {
      if (characters == width) return line.substr(0, end_of_short) + "...";
      if (characters + 3 == width) end_of_short = line.size();
      ++characters;
    }
    const auto code = static_cast<unsigned char>(byte);
    line += code < 0x20 || code == 0x7F ? ' ' : byte;
  }
  return line;
}

size_t text_width(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), begins_character));
}

}  // namespace tessera::tools
