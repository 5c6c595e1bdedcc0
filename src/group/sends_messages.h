#pragma once

#include <cstdint>

namespace tessera {

/// A process group that knows what it sends, as against what a collective should take.
class SendsMessages {
 public:
  virtual ~SendsMessages() = default;

  /// Bytes of all messages that this rank has sent so far.
  virtual int64_t sent_nbytes() const = 0;
};

}  // namespace tessera
