#include "comm/transfer_exchange.h"

#include <cstring>
#include <utility>

namespace tessera {

TransferExchange::TransferExchange(CollectiveName name, std::chrono::milliseconds timeout,
                                   bool wait_for_sends)
    : Exchange(std::move(name), timeout, /*runs_in_wait=*/true), wait_for_sends_(wait_for_sends) {}

void TransferExchange::complete_outputs() {
  for (const Transfer& transfer : receives_) {
    wait(transfer);
  }
  receives_.clear();
  if (wait_for_sends_) {
    complete_inputs();
  }
}

void TransferExchange::complete_inputs() {
  for (const Transfer& transfer : sends_) {
    wait(transfer);
  }
  sends_.clear();
  kept_.clear();
}

void post_all_gather(TransferExchange& exchange, const Mailbox& mailbox, int tag,
                     const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds) {
  const int rank = mailbox.rank();
  const int size = mailbox.size();
  const auto element_size = static_cast<int64_t>(flat.element_size());
  auto* const to = static_cast<std::byte*>(flat.mutable_data_ptr());
  const auto bytes_of = [&](int r) { return (bounds[r + 1] - bounds[r]) * element_size; };
  const auto place_of = [&](int r) { return to + bounds[r] * element_size; };
  exchange.keep(flat);
  exchange.keep(shard);
  // Each rank begins with its successor, so that not all send to the same rank at once. Receives
  // come first: a message whose receive is known goes out without another round.
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + size - step) % size;
    if (bytes_of(peer) > 0) {
      exchange.add_receive(mailbox.receive(place_of(peer), bytes_of(peer), peer, tag));
    }
  }
  if (bytes_of(rank) == 0) {
    return;
  }
  const void* const from = shard.const_data_ptr();
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    exchange.add_send(mailbox.send(from, bytes_of(rank), peer, tag));
  }
  if (place_of(rank) != from) {
    std::memmove(place_of(rank), from, bytes_of(rank));
  }
}

void post_broadcast(TransferExchange& exchange, const Mailbox& mailbox, int tag,
                    const at::Tensor& tensor, int root) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  exchange.keep(tensor);
  if (bytes == 0) {
    return;
  }
  if (mailbox.rank() != root) {
    exchange.add_receive(mailbox.receive(tensor.mutable_data_ptr(), bytes, root, tag));
    return;
  }
  for (int step = 1; step < mailbox.size(); ++step) {
    const int peer = (root + step) % mailbox.size();
    exchange.add_send(mailbox.send(tensor.const_data_ptr(), bytes, peer, tag));
  }
}

}  // namespace tessera
