#pragma once

#include <string>

#include "program_run.h"

namespace tessera {

/// `tessera run OPTIONS rank_probe FLAGS`, with short periods of grace.
inline Command launched(const Command& options, const Command& flags) {
  Command command = {TESSERA_CLI, "run", "--grace", "0.3"};
  command.insert(command.end(), options.begin(), options.end());
  command.push_back(RANK_PROBE);
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

/// The last line of `text`.
inline std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tessera
