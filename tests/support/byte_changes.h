#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "support/draw.h"

namespace tessera::testing {

inline void set_number(std::string& text, size_t place, Draw& draw) {
  const int64_t number = draw.number();
  const size_t size = std::min(size_t{1} << draw.below(4), text.size() - place);
  std::memcpy(text.data() + place, &number, size);
}

inline void change_once(std::string& text, Draw& draw, size_t most) {
  if (text.empty()) text.push_back('x');
  const size_t place = draw.below(draw.chance(80) ? std::min(most, text.size()) : text.size());
  const size_t count =
      std::min<size_t>(1 + draw.below(draw.chance(80) ? 8 : 4096), text.size() - place);
  switch (draw.below(8)) {
    case 0:
      text[place] = static_cast<char>(text[place] ^ (1 << draw.below(8)));
      return;
    case 1:
      text[place] = static_cast<char>(draw.below(256));
      return;
    case 2:
      return set_number(text, place, draw);
    case 3:
      text.erase(place, count);
      return;
    case 4:
      text.insert(place, text.substr(place, count));
      return;
    case 5:
      text.resize(place);
      return;
    case 6:
      text.insert(place, draw.text());
      return;
    default:
      std::rotate(text.begin() + place, text.begin() + place + draw.below(count),
                  text.begin() + place + count);
  }
}

/// Changes a few bytes of `text`, of which the first `most` are chosen more often: flips bits, sets
/// numbers, cuts, repeats and moves parts.
inline void change_bytes(std::string& text, Draw& draw, size_t most = SIZE_MAX) {
  for (size_t times = 1 + draw.below(4); times > 0; --times) change_once(text, draw, most);
}

}  // namespace tessera::testing
