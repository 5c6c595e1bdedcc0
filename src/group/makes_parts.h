#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// A world's process group that makes process groups of a subset of its ranks locally, without
/// communication.
class MakesParts {
 public:
  virtual ~MakesParts() = default;

  /// Makes a process group of `size` ranks, in which this process is `rank`.
  virtual ProcessGroupPtr make_part(int rank, int size) const = 0;
};

}  // namespace tessera
