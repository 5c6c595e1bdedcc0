#pragma once

#include <cctype>
#include <string>
#include <vector>

namespace tessera::testing {

/// Why `text` is no well-formed XML document of elements, attributes, comments and text without
/// entities other than those of XML itself; empty if it is one. Style sheets are taken as text.
inline std::string xml_error(const std::string& text) {
  std::vector<std::string> open;
  size_t roots = 0;
  for (size_t i = 0; i < text.size();) {
    if (text[i] == '&') {
      const std::string entity = text.substr(i, text.find(';', i) - i + 1);
      if (entity != "&amp;" && entity != "&lt;" && entity != "&gt;" && entity != "&quot;")
        return "entity " + entity;
      i += entity.size();
    } else if (text[i] == '>') {
      return "a bare >";
    } else if (text[i] != '<') {
      if (open.empty() && !std::isspace(static_cast<unsigned char>(text[i])))
        return "text outside of the root";
      ++i;
    } else if (text.compare(i, 2, "</") == 0) {
      const size_t end = text.find('>', i);
      if (end == std::string::npos || open.empty()) return "an end without a beginning";
      if (text.substr(i + 2, end - i - 2) != open.back()) return "the end of " + open.back();
      open.pop_back();
      i = end + 1;
    } else {
      size_t at = i + 1;
      while (at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])))) ++at;
      const std::string name = text.substr(i + 1, at - i - 1);
      if (name.empty()) return "an element without a name";
      if (open.empty() && ++roots > 1) return "a second root";
      while (true) {
        while (at < text.size() && std::isspace(static_cast<unsigned char>(text[at]))) ++at;
        if (at >= text.size()) return "the tag of " + name + " does not end";
        if (text[at] == '>' || text[at] == '/') break;
        const size_t equals = text.find('=', at);
        if (equals == std::string::npos || text[equals + 1] != '"')
          return "an attribute of " + name;
        const size_t quote = text.find('"', equals + 2);
        if (quote == std::string::npos) return "an attribute of " + name + " does not end";
        if (text.substr(equals + 2, quote - equals - 2).find('<') != std::string::npos)
          return "< in an attribute of " + name;
        at = quote + 1;
      }
      const bool is_empty = text[at] == '/';
      if (is_empty && text[++at] != '>') return "the tag of " + name;
      if (!is_empty) open.push_back(name);
      i = at + 1;
    }
  }
  if (!open.empty()) return open.back() + " is open";
  return roots == 1 ? "" : "no root";
}

}  // namespace tessera::testing
