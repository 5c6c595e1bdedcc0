#include "benchmarks/loop.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace tessera::tools {

LoopSwitches loop_switches(const std::string& names) {
  LoopSwitches switches;
  if (names == "none") return switches;
  std::istringstream list(names);
  for (std::string word; std::getline(list, word, ',');) {
    bool is_known = false;
    std::string known;
    for (const auto& [name, member] : kLoopSwitches) {
      known += std::string(name) + ", ";
      if (word != name && word != "all") continue;
      switches.*member = true;
      is_known = true;
    }
    TORCH_CHECK_VALUE(is_known, "[bench loop] a switch must be one of ", known,
                      "all or none; got '", word, "'");
  }
  return switches;
}

}  // namespace tessera::tools
