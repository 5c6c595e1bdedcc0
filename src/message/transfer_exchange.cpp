#include "message/transfer_exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "group/peer_message.h"
#include "message/message_plan.h"

namespace tessera {

TransferExchange::TransferExchange(CollectiveName name, std::chrono::milliseconds timeout,
                                   bool wait_for_sends)
    : Exchange(std::move(name), timeout, /*runs_in_wait=*/true), wait_for_sends_(wait_for_sends) {}

void TransferExchange::complete_outputs() {
  for (const Transfer& transfer : receives_) {
    wait(transfer);
  }
  receives_.clear();
  outputs_.clear();
  if (wait_for_sends_) {
    complete_inputs();
  }
}

void TransferExchange::complete_inputs() {
  for (const Transfer& transfer : sends_) {
    wait(transfer);
  }
  sends_.clear();
  inputs_.clear();
}

namespace {

// Calls `post(begin, bytes)` for each message that `bytes` are cut into. Many short messages pass
// through a socket faster than a long one: data is read before it leaves the cache.
template <class Post>
void cut_into_messages(int64_t bytes, const Post& post) {
  for (int64_t begin = 0; begin < bytes; begin += kMaxMessageBytes) {
    post(begin, std::min(kMaxMessageBytes, bytes - begin));
  }
}

void receive(TransferExchange& exchange, const Mailbox& mailbox, int tag, std::byte* to,
             int64_t bytes, int peer) {
  cut_into_messages(bytes, [&](int64_t begin, int64_t length) {
    exchange.add_receive(mailbox.receive(to + begin, length, peer, tag));
  });
}

// The data for one peer.
struct Outgoing {
  const std::byte* from = nullptr;
  int64_t bytes = 0;
  int tag = 0;
};

// Sends to the ranks after this one first, so that not all ranks send to the same rank at once.
// `outgoing(peer)`: the data for a peer, at most `longest` bytes.
template <class ToPeer>
void send_to_all(TransferExchange& exchange, const Mailbox& mailbox, int64_t longest,
                 const ToPeer& outgoing) {
  cut_into_messages(longest, [&](int64_t begin, int64_t /*length*/) {
    for (int step = 1; step < mailbox.size(); ++step) {
      const int peer = (mailbox.rank() + step) % mailbox.size();
      const Outgoing what = outgoing(peer);
      const int64_t length = std::min(kMaxMessageBytes, what.bytes - begin);
      if (length > 0) exchange.add_send(mailbox.send(what.from + begin, length, peer, what.tag));
    }
  });
}

}  // namespace

void post_all_gather(TransferExchange& exchange, const Mailbox& mailbox, int tag,
                     const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds) {
  const int rank = mailbox.rank();
  const int size = mailbox.size();
  const auto element_size = static_cast<int64_t>(flat.element_size());
  auto* const to = static_cast<std::byte*>(flat.mutable_data_ptr());
  const auto bytes_of = [&](int r) { return (bounds[r + 1] - bounds[r]) * element_size; };
  const auto place_of = [&](int r) { return to + bounds[r] * element_size; };
  exchange.keep_output(flat);
  exchange.keep_input(shard);
  // Receives come first: a message whose receive is posted is sent without another round trip.
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + size - step) % size;
    receive(exchange, mailbox, tag, place_of(peer), bytes_of(peer), peer);
  }
  const auto* const from = static_cast<const std::byte*>(shard.const_data_ptr());
  const Outgoing shown{from, bytes_of(rank), tag};
  send_to_all(exchange, mailbox, shown.bytes, [&](int) { return shown; });
  if (bytes_of(rank) > 0 && place_of(rank) != from) {
    std::memmove(place_of(rank), from, bytes_of(rank));
  }
}

void post_broadcast(TransferExchange& exchange, const Mailbox& mailbox, int tag,
                    const at::Tensor& tensor, int root) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  exchange.keep_output(tensor);
  exchange.keep_input(tensor);
  if (mailbox.rank() != root) {
    receive(exchange, mailbox, tag, static_cast<std::byte*>(tensor.mutable_data_ptr()), bytes,
            root);
  } else {
    const Outgoing shown{static_cast<const std::byte*>(tensor.const_data_ptr()), bytes, tag};
    send_to_all(exchange, mailbox, bytes, [&](int) { return shown; });
  }
}

void post_all_to_all(TransferExchange& exchange, const Mailbox& mailbox,
                     const std::function<int(const at::Tensor& message)>& tag_of,
                     std::span<const at::Tensor> from, std::span<const at::Tensor> to) {
  const int rank = mailbox.rank();
  const int size = mailbox.size();
  // Receives come first, as above.
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + size - step) % size;
    if (message_numel(from[peer]) == 0) continue;
    exchange.keep_output(from[peer]);
    receive(exchange, mailbox, tag_of(from[peer]),
            static_cast<std::byte*>(from[peer].mutable_data_ptr()), message_bytes(from[peer]),
            peer);
  }
  std::vector<Outgoing> outgoing(size);
  int64_t longest = 0;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank || message_numel(to[peer]) == 0) continue;
    exchange.keep_input(to[peer]);
    outgoing[peer] = {static_cast<const std::byte*>(to[peer].const_data_ptr()),
                      message_bytes(to[peer]), tag_of(to[peer])};
    longest = std::max(longest, outgoing[peer].bytes);
  }
  send_to_all(exchange, mailbox, longest, [&](int peer) { return outgoing[peer]; });
  take_own_message(from[rank], to[rank]);
}

}  // namespace tessera
