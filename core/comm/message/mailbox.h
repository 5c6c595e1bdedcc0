#pragma once

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/group/capability.h"

namespace tessera {

/// The longest message. One that fits the cache is read, and summed, before it leaves the cache,
/// while the next ones arrive.
inline constexpr int64_t kMaxMessageBytes = int64_t{1} << 20;

/// Calls `f(data, nbytes)` for each of the messages, of at most `kMaxMessageBytes`, in which
/// `nbytes` at `data` are sent or received.
template <class Byte, class F>
void for_each_message(Byte* data, int64_t nbytes, const F& f) {
  for (int64_t begin = 0; begin < nbytes; begin += kMaxMessageBytes)
    f(data + begin, std::min(kMaxMessageBytes, nbytes - begin));
}

/// A message in transit to or from `peer`.
struct Transfer {
  int peer = 0;
  c10::intrusive_ptr<c10d::Work> work;
};

/// Sends and receives memory through a c10d backend with tagged messages: Gloo.
///
/// Messages from one rank to another with one tag arrive in the order in which they were sent, in
/// the buffers in the order in which the buffers were given. The memory must stay alive, and must
/// not be reused, until the transfer's work has been waited for. Calls from several threads are
/// safe, as Gloo's pairs take their own locks. Copies share the connections.
///
/// [Note: One connection for each direction]
/// Gloo's thread and a sending thread take the same lock of a connection. If Gloo's thread finds it
/// taken, it polls the kernel again at once for data to read. If both share a core and the sender
/// was preempted, that burns the rest of a time slice. So messages from rank a to b and messages
/// from b to a use separate connections: while a rank writes to a connection, only short notices
/// arrive on it.
class Mailbox {
 public:
  /// The number of connections that the backend should have between two ranks; the message's tag
  /// selects one.
  static constexpr int kConnections = 2;

  explicit Mailbox(c10::intrusive_ptr<c10d::Backend> backend);

  /// Closes the connections of all copies: later messages throw `c10::DistBackendError`. No thread
  /// may be using them meanwhile.
  void close() { backend_->reset(); }

  /// In a forked child: prevents closing the connections, whose threads are the parent's.
  void leave_to_parent() noexcept;

  Transfer send(const void* data, int64_t bytes, int peer, int tag) const;
  Transfer receive(void* data, int64_t bytes, int peer, int tag) const;

  /// The messages sent so far, by all copies.
  SentMessages sent() const { return {sent_->count, sent_->nbytes}; }

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  struct Sent {
    std::atomic<int64_t> count = 0, nbytes = 0;
  };

  c10d::Backend& open_backend() const;
  static int tag_for(int tag, int from, int to);

  std::shared_ptr<c10::intrusive_ptr<c10d::Backend>> backend_;
  std::shared_ptr<Sent> sent_ = std::make_shared<Sent>();
  int rank_;
  int size_;
};

}  // namespace tessera
