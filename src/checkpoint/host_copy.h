#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "checkpoint/chunks.h"

namespace tessera {

/// Host memory that each save reuses: touching new memory for the first time costs more than the
/// copy into it.
class HostCopy {
 public:
  /// Copies the chunks and makes `contents` refer to the copies. Overwrites earlier copies.
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
