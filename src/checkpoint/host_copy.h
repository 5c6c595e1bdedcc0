#pragma once

#include <cstddef>
#include <memory>

#include "checkpoint/chunks.h"

namespace tessera {

/// Host memory that is used again for each save: memory that was never touched costs more than the
/// copy into it.
class HostCopy {
 public:
  /// Copies the chunks, and lets `contents` have the copies. What it copied before is lost.
  void take(RankContents& contents);

 private:
  std::unique_ptr<char[]> memory_;
  size_t nbytes_ = 0;
};

}  // namespace tessera
