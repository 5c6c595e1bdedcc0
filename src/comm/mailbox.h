#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera {

/// A message on its way to or from `peer`.
struct Transfer {
  int peer = 0;
  c10::intrusive_ptr<c10d::Work> work;
};

/// Sends and receives memory through a c10d backend with tagged messages, which is Gloo.
///
/// Messages from one rank to another with one tag arrive in the order in which they were sent, in
/// the buffers in the order in which those were given. The memory must live, and must not be
/// reused, until the transfer's work was waited for. Gloo's pairs take their own locks: safe from
/// several threads. Copies share the connections.
class Mailbox {
 public:
  explicit Mailbox(c10::intrusive_ptr<c10d::Backend> backend);

  /// Closes the connections of all copies: later messages throw `c10::DistBackendError`. Nobody may
  /// be using them meanwhile.
  void close() { backend_->reset(); }

  Transfer send(const void* data, int64_t bytes, int peer, int tag) const;
  Transfer receive(void* data, int64_t bytes, int peer, int tag) const;

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  c10d::Backend& open_backend() const;

  std::shared_ptr<c10::intrusive_ptr<c10d::Backend>> backend_;
  int rank_;
  int size_;
};

}  // namespace tessera
