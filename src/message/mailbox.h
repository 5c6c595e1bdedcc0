#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
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
///
/// [Note: One connection for each direction]
/// Gloo's thread and a thread that sends take the same lock of a connection, and Gloo's, finding it
/// taken, asks the kernel again at once for what is to be read. If both share a core and the sender
/// was put aside, that burns the rest of a time slice. So what rank a sends to b and what b sends
/// to a go through connections of their own: while one is written to, nothing comes from it but
/// short notices.
class Mailbox {
 public:
  /// Connections that the backend should have between two ranks; the message's tag chooses.
  static constexpr int kConnections = 2;

  explicit Mailbox(c10::intrusive_ptr<c10d::Backend> backend);

  /// Closes the connections of all copies: later messages throw `c10::DistBackendError`. Nobody may
  /// be using them meanwhile.
  void close() { backend_->reset(); }

  /// In a forked child: keeps the connections, whose threads are the parent's, from being closed.
  void leave_to_parent() noexcept;

  Transfer send(const void* data, int64_t bytes, int peer, int tag) const;
  Transfer receive(void* data, int64_t bytes, int peer, int tag) const;

  /// Bytes that were sent so far, by all copies.
  int64_t sent_nbytes() const { return *sent_nbytes_; }

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  c10d::Backend& open_backend() const;
  static int tag_for(int tag, int from, int to);

  std::shared_ptr<c10::intrusive_ptr<c10d::Backend>> backend_;
  std::shared_ptr<std::atomic<int64_t>> sent_nbytes_ = std::make_shared<std::atomic<int64_t>>(0);
  int rank_;
  int size_;
};

}  // namespace tessera
