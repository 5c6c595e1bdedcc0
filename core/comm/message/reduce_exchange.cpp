#include "comm/message/reduce_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <span>
#include <utility>

#include "comm/group/encoding.h"

namespace tessera {
namespace {

// The number of messages that are received from each peer at once.
constexpr size_t kWindow = 8;

// With this many blocks in use, a reduction that waits for its turn takes none yet.
constexpr size_t kMaxEarlyBlocks = 16;

// Parts of pieces up to this size are copied into a common message.
constexpr int64_t kMaxPackedBytes = int64_t{32} << 10;

// The elements that are decoded before they are summed, in whole blocks: they stay in the cache.
constexpr int64_t kDecodedNumel = 16 * kEncodedBlock;

// A part of one piece.
struct PiecePart {
  size_t piece = 0;
  int64_t begin = 0;  // in the flat buffer
  int64_t numel = 0;
};

// Parts [first, last) of the plan, each encoded by itself, one after another.
struct Message {
  size_t first = 0;
  size_t last = 0;
  int64_t nbytes = 0;
};

// The size of elements in a message.
struct ElementForm {
  Encoding encoding = Encoding::kPlain;
  at::ScalarType dtype = at::kFloat;

  bool is_plain() const { return encoding == Encoding::kPlain; }
  int64_t nbytes(int64_t numel) const { return encoded_nbytes(encoding, numel, dtype); }
  // The most elements of a part that fit a message, in whole blocks.
  int64_t max_numel() const { return kMaxMessageBytes / nbytes(kEncodedBlock) * kEncodedBlock; }
};

// How a range of a flat buffer that is given in pieces is cut into messages. It depends on the
// arguments alone, so that sender and receiver compute the same plan.
struct MessagePlan {
  MessagePlan(std::span<const Piece> pieces, const FlatRange& range, const ElementForm& form) {
    const int64_t max_numel = form.max_numel();
    for (size_t piece = 0; piece < pieces.size(); ++piece) {
      const int64_t stop = std::min(range.end, pieces[piece].begin + pieces[piece].numel);
      for (int64_t at = std::max(range.begin, pieces[piece].begin); at < stop;) {
        const PiecePart part{piece, at, std::min(stop - at, max_numel)};
        if (may_join(part, form)) {
          messages.back().last += 1;
          messages.back().nbytes += form.nbytes(part.numel);
        } else {
          messages.push_back({parts.size(), parts.size() + 1, form.nbytes(part.numel)});
        }
        parts.push_back(part);
        at += part.numel;
      }
    }
  }

  // True if `part` may join the last message.
  bool may_join(const PiecePart& part, const ElementForm& form) const {
    return !messages.empty() && form.nbytes(part.numel) <= kMaxPackedBytes &&
           form.nbytes(parts.back().numel) <= kMaxPackedBytes &&
           messages.back().nbytes + form.nbytes(part.numel) <= kMaxMessageBytes;
  }

  std::vector<PiecePart> parts;
  std::vector<Message> messages;
};

// The values of parts without data. Encoded ones have up to 4 bytes for each byte of a message.
const std::byte* zeros() {
  static const auto memory = std::make_unique<std::byte[]>(4 * kMaxMessageBytes);
  return memory.get();
}

class ReduceExchange : public Exchange {
 public:
  ReduceExchange(CollectiveName name, std::chrono::milliseconds timeout,
                 std::shared_ptr<BlockPool> pool, const Mailbox& mailbox, ReduceTask task)
      : Exchange(std::move(name), timeout, /*runs_in_wait=*/false),
        pool_(std::move(pool)),
        mailbox_(mailbox),
        task_(std::move(task)),
        element_size_(static_cast<int64_t>(c10::elementSize(task_.reduction.dtype))),
        form_{task_.encoding, task_.reduction.dtype},
        out_element_size_(static_cast<int64_t>(c10::elementSize(task_.reduction.dtype_of_out()))),
        data_(static_cast<std::byte*>(task_.out.mutable_data_ptr())),
        plan_(plan_for(mailbox_.rank())) {}

  void post_messages() {
    const int rank = mailbox_.rank();
    const int size = mailbox_.size();
    const bool early = pool_->in_use() < kMaxEarlyBlocks;
    prepare_error();
    for (size_t m = 0; early && m < std::min(kWindow, plan_.messages.size()); ++m) {
      post_receives(m);
    }
    std::vector<MessagePlan> plans;
    size_t longest = 0;
    for (int step = 1; step < size; ++step) {
      plans.push_back(plan_for((rank + step) % size));
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

 private:
  struct Arrival {
    BlockPool::Block block;  // destroyed after the transfer that fills it
    Transfer transfer;
  };

  void complete_outputs() override {
    if (task_.gather_tag) {
      reduce_and_gather(*task_.gather_tag);
    } else {
      reduce(data_);
    }
    task_.out.reset();  // the caller may have freed it by the time a slow peer has the messages
  }

  void complete_inputs() override {
    for (const Transfer& transfer : sends_) wait(transfer);
    sends_.clear();
    packed_.clear();
    task_.pieces.clear();
  }

  void reduce_and_gather(int tag) {
    const int rank = mailbox_.rank(), size = mailbox_.size();
    // A peer's part arrives only after the peer has received this rank's data for it, so that
    // memory is free by then.
    std::vector<Transfer> transfers;
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + size - step) % size;
      for_each_message_of(peer, [&](std::byte* data, int64_t nbytes) {
        transfers.push_back(mailbox_.receive(data, nbytes, peer, tag));
      });
    }
    reduce(place_of(rank));
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;
      for_each_message_of(rank, [&](const std::byte* data, int64_t nbytes) {
        transfers.push_back(mailbox_.send(data, nbytes, peer, tag));
      });
    }
    for (const Transfer& transfer : transfers) wait(transfer);
    complete_inputs();  // `out` may be an input, too: no message of it may be in transit
  }

  // Returns the place of a rank's reduced range in `out`. That has room for all.
  std::byte* place_of(int r) const { return data_ + task_.ranges[r].begin * out_element_size_; }

  // Calls `f(data, nbytes)` for the messages in which that range is sent.
  template <class F>
  void for_each_message_of(int r, const F& f) const {
    const auto& [begin, end] = task_.ranges[r];
    for_each_message(place_of(r), (end - begin) * out_element_size_, f);
  }

  // Reduces this rank's range into the memory at `out`.
  void reduce(std::byte* out) {
    const size_t count = plan_.messages.size();
    for (size_t m = 0; m < count; ++m) {
      while (next_receive_ < std::min(m + kWindow, count)) post_receives(next_receive_);
      for (const Arrival& arrival : arrivals_.front()) wait(arrival.transfer);
      reduce_message(plan_.messages[m], arrivals_.front(), out);
      arrivals_.pop_front();
    }
  }

  MessagePlan plan_for(int rank) const {
    return MessagePlan(task_.pieces, task_.ranges[rank], form_);
  }

  // Other data, as after a change of the plan, begins without errors.
  void prepare_error() {
    if (!task_.error) return;
    at::Tensor& error = *task_.error;
    const int64_t numel = task_.ranges.back().end;
    if (error.defined() && error.numel() == numel) return;
    error = at::empty({numel}, at::TensorOptions().dtype(at::kFloat).requires_grad(false));
    if (numel > 0) std::memset(error.mutable_data_ptr(), 0, error.nbytes());
  }

  void post_receives(size_t message) {
    std::vector<Arrival>& arrivals = arrivals_.emplace_back();
    const int64_t bytes = plan_.messages[message].nbytes;
    for (int peer = 0; peer < mailbox_.size(); ++peer) {
      if (peer != mailbox_.rank()) {
        Arrival& arrival = arrivals.emplace_back();
        arrival.block = pool_->take();
        arrival.transfer = mailbox_.receive(arrival.block.get(), bytes, peer, task_.tag);
      }
    }
    next_receive_ = message + 1;
  }

  void send_message(const MessagePlan& plan, size_t message, int peer) {
    const Message& cut = plan.messages[message];
    if (cut.last - cut.first == 1 && form_.is_plain()) {
      sends_.push_back(mailbox_.send(own_data(plan.parts[cut.first]), cut.nbytes, peer, task_.tag));
      return;
    }
    std::byte* to = packed_.emplace_back(pool_->take()).get();
    for (size_t i = cut.first; i < cut.last; ++i) {
      pack(plan.parts[i], to);
      to += form_.nbytes(plan.parts[i].numel);
    }
    sends_.push_back(mailbox_.send(packed_.back().get(), cut.nbytes, peer, task_.tag));
  }

  void pack(const PiecePart& part, std::byte* to) const {
    if (form_.is_plain()) {
      std::memcpy(to, own_data(part), part.numel * element_size_);
      return;
    }
    float* error = nullptr;
    if (task_.error) error = task_.error->mutable_data_ptr<float>() + part.begin;
    encode(task_.encoding, task_.reduction.dtype, own_data(part), part.numel, to, error);
  }

  void reduce_message(const Message& message, std::span<const Arrival> arrivals, std::byte* out) {
    const int64_t range_begin = task_.ranges[mailbox_.rank()].begin;
    int64_t offset = 0;
    for (size_t i = message.first; i < message.last; ++i) {
      const PiecePart& part = plan_.parts[i];
      std::byte* const to = out + (part.begin - range_begin) * out_element_size_;
      form_.is_plain() ? reduce_plain(part, arrivals, offset, to)
                       : reduce_encoded(part, arrivals, offset, to);
      offset += form_.nbytes(part.numel);
    }
  }

  // `offset`: bytes from the start of the arrivals.
  void reduce_plain(const PiecePart& part, std::span<const Arrival> arrivals, int64_t offset,
                    std::byte* out) {
    std::vector<const void*> inputs(mailbox_.size());
    for (const Arrival& arrival : arrivals)
      inputs[arrival.transfer.peer] = arrival.block.get() + offset;
    inputs[mailbox_.rank()] = own_data(part);
    reduce_in_order(task_.reduction, out, inputs, part.numel);
  }

  void reduce_encoded(const PiecePart& part, std::span<const Arrival> arrivals, int64_t offset,
                      std::byte* out) {
    LocalReduction reduction = task_.reduction;
    reduction.out_dtype = reduction.dtype_of_out();
    reduction.dtype = at::kFloat;
    decoded_.resize(mailbox_.size() * kDecodedNumel);
    std::vector<const void*> inputs;
    for (int r = 0; r < mailbox_.size(); ++r) inputs.push_back(decoded_.data() + r * kDecodedNumel);
    for (int64_t begin = 0; begin < part.numel; begin += kDecodedNumel) {
      const int64_t numel = std::min(kDecodedNumel, part.numel - begin);
      for (const Arrival& arrival : arrivals) {
        decode(task_.encoding, arrival.block.get() + offset + form_.nbytes(begin), numel,
               at::kFloat, decoded_.data() + arrival.transfer.peer * kDecodedNumel);
      }
      widen(task_.reduction.dtype, own_data(part) + begin * element_size_, numel,
            decoded_.data() + mailbox_.rank() * kDecodedNumel);
      reduce_in_order(reduction, out + begin * out_element_size_, inputs, numel);
    }
  }

  const std::byte* own_data(const PiecePart& part) const {
    const Piece& piece = task_.pieces[part.piece];
    if (!piece.data.defined()) return zeros();
    return static_cast<const std::byte*>(piece.data.const_data_ptr()) +
           (part.begin - piece.begin) * element_size_;
  }

  const std::shared_ptr<BlockPool> pool_;
  const Mailbox mailbox_;
  ReduceTask task_;
  const int64_t element_size_;      // of the elements that are reduced
  const ElementForm form_;          // of the elements that are sent
  const int64_t out_element_size_;  // of the elements that are stored
  std::byte* const data_;           // of `out`
  const MessagePlan plan_;          // of this rank's range

  // Destroyed after the transfers that use their memory.
  std::vector<BlockPool::Block> packed_;
  std::vector<Transfer> sends_;
  // Those of the oldest message not reduced yet, and of later ones.
  std::deque<std::vector<Arrival>> arrivals_;
  size_t next_receive_ = 0;
  std::vector<float> decoded_;  // per rank
};

}  // namespace

std::shared_ptr<Exchange> start_reduction(CollectiveName name, std::chrono::milliseconds timeout,
                                          std::shared_ptr<BlockPool> pool, const Mailbox& mailbox,
                                          ReduceTask task) {
  const auto exchange = std::make_shared<ReduceExchange>(std::move(name), timeout, std::move(pool),
                                                         mailbox, std::move(task));
  exchange->post([&] { exchange->post_messages(); });
  return exchange;
}

}  // namespace tessera
