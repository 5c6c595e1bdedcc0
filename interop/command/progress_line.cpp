#include "interop/command/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

namespace tessera::tools {

CheckpointProgress progress_line(const std::string& what) {
  const bool is_terminal = ::isatty(STDERR_FILENO) == 1;
  const auto shown = std::make_shared<int64_t>(-1);  // percent
  return [what, is_terminal, shown](int64_t done, int64_t total) {
    const int64_t percent = total > 0 ? done * 100 / total : 100;
    const int64_t step = is_terminal ? 1 : 10;
    if (percent / step == *shown / step && *shown >= 0 && percent != 100) return;
    if (percent == *shown) return;
    *shown = percent;
    const auto line =
        fmt::format("{}: {:.1f} of {:.1f} MB ({} %)", what, done / 1e6, total / 1e6, percent);
    const bool ends = !is_terminal || percent == 100;
    std::fputs((is_terminal ? "\r\033[K" + line : line).c_str(), stderr);
    if (ends) std::fputs("\n", stderr);
    std::fflush(stderr);
  };
}

}  // namespace tessera::tools
