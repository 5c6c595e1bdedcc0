#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// A process group of a world that makes those of some of its ranks by itself: they need not meet.
class MakesParts {
 public:
  virtual ~MakesParts() = default;

  /// A process group of `size` ranks, of which this one is `rank`.
  virtual ProcessGroupPtr make_part(int rank, int size) const = 0;
};

}  // namespace tessera
