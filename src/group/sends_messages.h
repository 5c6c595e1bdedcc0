#pragma once

#include <cstdint>

namespace tessera {

/// A process group that counts the bytes that it actually sends, as opposed to the bytes that a
/// collective should take.
class SendsMessages {
 public:
  virtual ~SendsMessages() = default;

  /// Returns the bytes of all messages that this rank has sent so far.
  virtual int64_t sent_nbytes() const = 0;
};

}  // namespace tessera
