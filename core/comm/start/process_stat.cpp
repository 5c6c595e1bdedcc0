#include "comm/start/process_stat.h"

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace tessera {

std::optional<ProcessStat> process_stat(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t name_end = text.rfind(')');  // "12 (name) S 1 ...", in which a name may have one
  if (name_end == std::string::npos) return std::nullopt;
  ProcessStat stat;
  std::istringstream(text.substr(name_end + 1)) >> stat.state >> stat.parent;
  const bool has_ended = stat.state == 0 || stat.state == 'Z' || stat.state == 'X';
  return has_ended ? std::nullopt : std::optional(stat);
}

}  // namespace tessera
