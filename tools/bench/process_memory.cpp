#include "bench/process_memory.h"

#include <c10/util/Exception.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace tessera::tools {

int64_t pss_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Pss:")) return std::stoll(line.substr(4)) * 1024;  // in kB
  }
  TORCH_CHECK(false, "[pss_bytes] /proc/self/smaps_rollup must have a line 'Pss:' (Linux 4.14)");
}

int64_t minor_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

PeakPss::PeakPss(std::chrono::milliseconds interval) : peak_(pss_bytes()) {
  thread_ = std::thread([this, interval] {
    while (!stopped_) {
      peak_ = std::max(peak_, pss_bytes());
      std::this_thread::sleep_for(interval);
    }
  });
}

PeakPss::~PeakPss() { stop(); }

int64_t PeakPss::stop() {
  if (thread_.joinable()) {
    stopped_ = true;
    thread_.join();
    peak_ = std::max(peak_, pss_bytes());
  }
  return peak_;
}

}  // namespace tessera::tools
