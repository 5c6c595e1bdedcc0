#include "comm/start/wait_report.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdio>

#include "comm/group/environment.h"

namespace tessera {

using std::chrono::seconds;

seconds report_after() {
  const int number = environment_number("TESSERA_REPORT_AFTER").value_or(10);
  TORCH_CHECK_VALUE(
      number > 0,
      "[init] TESSERA_REPORT_AFTER must be a positive number of seconds; got TESSERA_REPORT_AFTER=",
      number);
  return seconds(number);
}

WaitReport::WaitReport(const Deadline& deadline)
    : deadline_(deadline),
      interval_(report_after()),
      next_(interval_ * (1 + std::chrono::floor<seconds>(deadline.waited()) / interval_)) {}

void WaitReport::print_if_due(const std::function<std::string(int64_t seconds)>& text) {
  if (deadline_.waited() < next_) return;
  const std::string line = text(next_.count());
  if (!line.empty()) fmt::print(stderr, "[tessera] {}\n", line);
  next_ += interval_;
}

}  // namespace tessera
