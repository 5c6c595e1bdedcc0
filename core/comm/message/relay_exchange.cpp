#include "comm/message/relay_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace tessera {
namespace {

// [Note: Rounds of a relay]
//
// In round k a rank has the data of the 2^k ranks from itself on, counted around. It sends them to
// the rank 2^k before it, and receives those of the 2^k ranks that follow from the rank 2^k behind
// it. The last round takes only the data that is missing. A rank that has received a round's data
// sends in the next one, so every rank works for others: a thread of the process group does it, as
// the rank itself may be waiting for another collective.
class RelayExchange : public Exchange {
 public:
  RelayExchange(CollectiveName name, std::chrono::milliseconds timeout, const Mailbox& mailbox,
                RelayTask task)
      : Exchange(std::move(name), timeout, /*runs_in_wait=*/false),
        mailbox_(mailbox),
        task_(std::move(task)),
        data_(static_cast<std::byte*>(task_.flat.mutable_data_ptr())) {}

  void post_messages() {
    const int size = mailbox_.size();
    for (int have = 1; have < size; have *= 2) {
      std::vector<Transfer>& receives = rounds_.emplace_back();
      const int peer = after(have);
      for_each_message_of(peer, std::min(have, size - have), [&](std::byte* data, int64_t nbytes) {
        receives.push_back(mailbox_.receive(data, nbytes, peer, task_.tag));
      });
    }
    send(1);
  }

 private:
  void complete_outputs() override {
    int have = 1;
    for (const std::vector<Transfer>& receives : rounds_) {
      for (const Transfer& transfer : receives) wait(transfer, awaited(transfer.peer));
      have *= 2;
      send(have);
    }
    rounds_.clear();
    for (const Transfer& transfer : sends_) wait(transfer);
    sends_.clear();
    if (task_.out.defined()) reduce();
    task_.flat.reset();
    task_.out.reset();
  }

  void complete_inputs() override {}

  int after(int distance) const { return (mailbox_.rank() + distance) % mailbox_.size(); }

  // Sends the data of the `have` ranks from this one on, as far as the receiver lacks them.
  void send(int have) {
    const int size = mailbox_.size();
    if (have >= size) return;
    const int peer = after(size - have);
    for_each_message_of(mailbox_.rank(), std::min(have, size - have),
                        [&](const std::byte* data, int64_t nbytes) {
                          sends_.push_back(mailbox_.send(data, nbytes, peer, task_.tag));
                        });
  }

  // Calls `f(data, nbytes)` for the messages with the data of `count` ranks from `first` on.
  template <class F>
  void for_each_message_of(int first, int count, const F& f) const {
    const int size = mailbox_.size();
    const int end = std::min(first + count, size);
    const std::pair<int, int> stretches[] = {{first, end}, {0, first + count - end}};
    for (const auto& [from, to] : stretches)
      for_each_message(data_ + task_.bounds[from], task_.bounds[to] - task_.bounds[from], f);
  }

  void reduce() const {
    std::vector<const void*> inputs;
    for (int r = 0; r < mailbox_.size(); ++r) inputs.push_back(data_ + task_.bounds[r]);
    reduce_in_order(task_.reduction, task_.out.mutable_data_ptr(), inputs, task_.out.numel());
  }

  static Awaited awaited(int peer) {
    return {-1, fmt::format("rank {}, which passes on the data of others", peer)};
  }

  const Mailbox mailbox_;
  RelayTask task_;
  std::byte* const data_;  // of `flat`
  // Destroyed before the tensors that they use.
  std::vector<std::vector<Transfer>> rounds_;  // the receives of each
  std::vector<Transfer> sends_;
};

}  // namespace

std::shared_ptr<Exchange> start_relay(CollectiveName name, std::chrono::milliseconds timeout,
                                      const Mailbox& mailbox, RelayTask task) {
  const auto exchange =
      std::make_shared<RelayExchange>(std::move(name), timeout, mailbox, std::move(task));
  exchange->post([&] { exchange->post_messages(); });
  return exchange;
}

}  // namespace tessera
