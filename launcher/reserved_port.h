#pragma once

#include "launcher/unique_fd.h"

namespace tessera::tools {

/// A TCP port that other programs do not get by chance while this object lives.
class ReservedPort {
 public:
  /// Takes `port`, or any free one if it is 0. Throws `std::system_error` if it is in use.
  explicit ReservedPort(int port);
  int number() const { return number_; }

 private:
  UniqueFd socket_;
  int number_ = 0;
};

}  // namespace tessera::tools
