#pragma once

#include <cstdint>

namespace tessera {

/// Tells a process from the children that it forks: what belongs to a process, as its threads and
/// connections do, is of no use to a child that has a copy of it.
class ProcessMark {
 public:
  /// Marks the calling process.
  ProcessMark();

  /// True in a child that was forked after this was made.
  bool is_inherited() const;

 private:
  int64_t forks_;
};

}  // namespace tessera
