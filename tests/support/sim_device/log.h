#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::testing::sim {

/// An operation of a stream. Times are 0 until it begins and ends.
struct LoggedOperation {
  int device = 0;
  int64_t stream = 0;
  std::string name;  ///< "aten::mm.out", "all_gather", "copy to device", "poison", ...
  std::chrono::steady_clock::time_point issued, begin, end;
};

/// Whether both operations were running at some moment.
inline bool overlap(const LoggedOperation& a, const LoggedOperation& b) {
  return a.begin < b.end && b.begin < a.end;
}

/// Records the operations of all streams while it lives. One at a time.
class Log {
 public:
  Log();
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  /// In the order in which threads issued them; waits for all of them to end.
  std::vector<LoggedOperation> operations() const;
};

/// For streams: the entry of an operation that is being issued; null if nothing is recorded.
std::shared_ptr<LoggedOperation> log_operation(int device, int64_t stream, std::string name);
void log_run(LoggedOperation& operation, std::chrono::steady_clock::time_point begin,
             std::chrono::steady_clock::time_point end);

}  // namespace tessera::testing::sim
