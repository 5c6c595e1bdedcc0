#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "comm/start/deadline.h"

namespace tessera {

/// Returns the time after which a rank reports that it waits, and again each time: 10 seconds, or
/// TESSERA_REPORT_AFTER (seconds).
std::chrono::seconds report_after();

/// Prints a line on stderr each time that `report_after()` passes after the start of a deadline.
class WaitReport {
 public:
  explicit WaitReport(const Deadline& deadline);

  /// Prints "[tessera] " and `text(S)`, S the seconds of the wait, if it is time. No line if the
  /// text is empty.
  void print_if_due(const std::function<std::string(int64_t seconds)>& text);

 private:
  Deadline deadline_;
  std::chrono::seconds interval_;
  std::chrono::seconds next_;
};

}  // namespace tessera
