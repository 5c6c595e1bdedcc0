#include "message/reduce_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tessera {
namespace {

// The number of messages that are received from each peer at once.
constexpr size_t kWindow = 8;

// With this many blocks in use, a reduction that waits for its turn takes none yet.
constexpr size_t kMaxEarlyBlocks = 16;

// Sent in place of pieces without data.
const std::byte* zeros() {
  static const auto memory = std::make_unique<std::byte[]>(kMaxMessageBytes);
  return memory.get();
}

}  // namespace

ReduceExchange::ReduceExchange(CollectiveName name, std::chrono::milliseconds timeout,
                               std::shared_ptr<BlockPool> pool, const Mailbox& mailbox,
                               ReduceTask task)
    : Exchange(std::move(name), timeout, /*runs_in_wait=*/false),
      pool_(std::move(pool)),
      mailbox_(mailbox),
      element_size_(static_cast<int64_t>(c10::elementSize(task.reduction.dtype))),
      out_element_size_(static_cast<int64_t>(c10::elementSize(task.reduction.dtype_of_out()))),
      task_(std::move(task)) {
  const FlatRange& own = task_.ranges[mailbox_.rank()];
  plan_ = plan_messages(task_.pieces, own.begin, own.end, element_size_);
}

void ReduceExchange::post_messages() {
  const int rank = mailbox_.rank();
  const int size = mailbox_.size();
  const bool early = pool_->in_use() < kMaxEarlyBlocks;
  for (size_t m = 0; early && m < std::min(kWindow, plan_.messages.size()); ++m) {
    post_receives(m);
  }
  std::vector<MessagePlan> plans;
  size_t longest = 0;
  for (int step = 1; step < size; ++step) {
    const FlatRange& range = task_.ranges[(rank + step) % size];
    plans.push_back(plan_messages(task_.pieces, range.begin, range.end, element_size_));
    longest = std::max(longest, plans.back().messages.size());
  }
  for (size_t m = 0; m < longest; ++m) {
    for (int step = 1; step < size; ++step) {
      if (m < plans[step - 1].messages.size()) {
        send_message(plans[step - 1], m, (rank + step) % size);
      }
    }
  }
}

void ReduceExchange::post_receives(size_t message) {
  std::vector<Arrival>& arrivals = arrivals_.emplace_back();
  const int64_t bytes = plan_.messages[message].numel * element_size_;
  for (int peer = 0; peer < mailbox_.size(); ++peer) {
    if (peer != mailbox_.rank()) {
      Arrival& arrival = arrivals.emplace_back();
      arrival.block = pool_->take();
      arrival.transfer = mailbox_.receive(arrival.block.get(), bytes, peer, task_.tag);
    }
  }
  next_receive_ = message + 1;
}

void ReduceExchange::send_message(const MessagePlan& plan, size_t message, int peer) {
  const Message& cut = plan.messages[message];
  const int64_t bytes = cut.numel * element_size_;
  if (cut.last - cut.first == 1) {
    sends_.push_back(mailbox_.send(own_data(plan.parts[cut.first]), bytes, peer, task_.tag));
    return;
  }
  std::byte* to = packed_.emplace_back(pool_->take()).get();
  for (size_t i = cut.first; i < cut.last; ++i) {
    const PiecePart& part = plan.parts[i];
    std::memcpy(to, own_data(part), part.numel * element_size_);
    to += part.numel * element_size_;
  }
  sends_.push_back(mailbox_.send(packed_.back().get(), bytes, peer, task_.tag));
}

const std::byte* ReduceExchange::own_data(const PiecePart& part) const {
  const Piece& piece = task_.pieces[part.piece];
  if (!piece.data.defined()) {
    return zeros();
  }
  return static_cast<const std::byte*>(piece.data.const_data_ptr()) +
         (part.begin - piece.begin) * element_size_;
}

void ReduceExchange::complete_outputs() {
  const size_t count = plan_.messages.size();
  for (size_t m = 0; m < count; ++m) {
    while (next_receive_ < std::min(m + kWindow, count)) {
      post_receives(next_receive_);
    }
    for (const Arrival& arrival : arrivals_.front()) {
      wait(arrival.transfer);
    }
    reduce_message(plan_.messages[m], arrivals_.front());
    arrivals_.pop_front();
  }
}

void ReduceExchange::reduce_message(const Message& message, std::span<const Arrival> arrivals) {
  const int64_t range_begin = task_.ranges[mailbox_.rank()].begin;
  std::vector<const void*> inputs(mailbox_.size());
  int64_t offset = 0;
  for (size_t i = message.first; i < message.last; ++i) {
    const PiecePart& part = plan_.parts[i];
    for (const Arrival& arrival : arrivals) {
      inputs[arrival.transfer.peer] = arrival.block.get() + offset * element_size_;
    }
    inputs[mailbox_.rank()] = own_data(part);
    reduce_in_order(task_.reduction, task_.out + (part.begin - range_begin) * out_element_size_,
                    inputs, part.numel);
    offset += part.numel;
  }
}

void ReduceExchange::complete_inputs() {
  for (const Transfer& transfer : sends_) {
    wait(transfer);
  }
  sends_.clear();
  packed_.clear();
  task_.pieces.clear();
  kept_.clear();
}

AllReduceExchange::AllReduceExchange(CollectiveName name, std::chrono::milliseconds timeout,
                                     std::shared_ptr<BlockPool> pool, const Mailbox& mailbox,
                                     ReduceTask task, std::byte* data, int gather_tag)
    : ReduceExchange(std::move(name), timeout, std::move(pool), mailbox, task),
      mailbox_(mailbox),
      ranges_(std::move(task.ranges)),
      element_size_(static_cast<int64_t>(c10::elementSize(task.reduction.dtype))),
      data_(data),
      gather_tag_(gather_tag) {}

void AllReduceExchange::complete_outputs() {
  const auto bytes_of = [&](int r) { return (ranges_[r].end - ranges_[r].begin) * element_size_; };
  const auto place_of = [&](int r) { return data_ + ranges_[r].begin * element_size_; };
  const int rank = mailbox_.rank();
  // A peer's part arrives only after the peer has received this rank's data for it, so that memory
  // is free by then.
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < mailbox_.size(); ++peer) {
    if (peer != rank && bytes_of(peer) > 0) {
      transfers.push_back(mailbox_.receive(place_of(peer), bytes_of(peer), peer, gather_tag_));
    }
  }
  ReduceExchange::complete_outputs();
  for (int step = 1; step < mailbox_.size() && bytes_of(rank) > 0; ++step) {
    const int peer = (rank + step) % mailbox_.size();
    transfers.push_back(mailbox_.send(place_of(rank), bytes_of(rank), peer, gather_tag_));
  }
  for (const Transfer& transfer : transfers) {
    wait(transfer);
  }
  complete_inputs();  // the tensor is input and output: no message of it may be in transit any more
}

}  // namespace tessera
