#include <c10/util/Exception.h>
#include <tessera/base/process_memory.h>

#include <fstream>
#include <string>

namespace tessera {

int64_t pss_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Pss:")) return std::stoll(line.substr(4)) * 1024;  // in kB
  }
  TORCH_CHECK(false, "[pss_bytes] /proc/self/smaps_rollup must have a line 'Pss:' (Linux 4.14)");
}

}  // namespace tessera
