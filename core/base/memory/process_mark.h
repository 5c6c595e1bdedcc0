#pragma once

#include <cstdint>

namespace tessera {

/// Tells a process from the children that it forks: resources of a process, such as its threads and
/// connections, are of no use to a child that has a copy of them.
class ProcessMark {
 public:
  /// Marks the calling process.
  ProcessMark();

  /// Returns true in a child that was forked after this object was made.
  bool is_inherited() const;

 private:
  int64_t forks_;
};

}  // namespace tessera
