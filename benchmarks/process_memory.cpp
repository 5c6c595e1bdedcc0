#include "benchmarks/process_memory.h"

#include <sys/resource.h>
#include <tessera/base/process_memory.h>

#include <algorithm>

namespace tessera::tools {

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
