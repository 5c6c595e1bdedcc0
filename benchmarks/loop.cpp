#include "benchmarks/loop.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <sstream>
#include <utility>

namespace tessera::tools {
namespace {

constexpr std::pair<const char*, bool LoopSwitches::*> kSwitches[] = {
    {"clip", &LoopSwitches::clip},
    {"schedule", &LoopSwitches::schedule},
    {"accumulate", &LoopSwitches::accumulate},
    {"evaluate", &LoopSwitches::evaluate},
    {"bf16", &LoopSwitches::bf16},
    {"checkpoint", &LoopSwitches::checkpoint},
    {"dropout", &LoopSwitches::dropout},
};

}  // namespace

const std::vector<std::string>& loop_switch_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& [name, member] : kSwitches) result.emplace_back(name);
    return result;
  }();
  return names;
}

LoopSwitches loop_switches(const std::string& names) {
  LoopSwitches switches;
  if (names == "none") return switches;
  std::istringstream list(names);
  for (std::string word; std::getline(list, word, ',');) {
    bool is_known = false;
    for (const auto& [name, member] : kSwitches) {
      if (word != name && word != "all") continue;
      switches.*member = true;
      is_known = true;
    }
    TORCH_CHECK_VALUE(is_known, "[bench loop] a switch must be one of ",
                      c10::Join(", ", loop_switch_names()), ", all or none; got '", word, "'");
  }
  return switches;
}

}  // namespace tessera::tools
