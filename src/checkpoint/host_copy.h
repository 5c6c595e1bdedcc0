#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "checkpoint/chunks.h"

namespace tessera {

/// Host memory that is used again for each save: memory that was never touched costs more than the
/// copy into it.
class HostCopy {
 public:
  /// Copies the chunks, and lets `contents` have the copies. What it copied before is lost.
  void take(RankContents& contents);

  static constexpr size_t kAlignment = 64;  ///< bytes, of each copy

 private:
  struct Delete {
    void operator()(char* memory) const {
      ::operator delete[](memory, std::align_val_t(kAlignment));
    }
  };
  std::unique_ptr<char[], Delete> memory_;
  size_t nbytes_ = 0;
};

}  // namespace tessera
