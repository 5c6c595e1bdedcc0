#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "group/local_sum.h"
#include "message/block_pool.h"
#include "message/exchange.h"
#include "message/message_plan.h"
#include "message/transfer_exchange.h"

namespace tessera {

/// The part of the flat buffer that one rank reduces.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// The task of a `ReduceExchange`.
struct ReduceTask {
  std::vector<Piece> pieces;
  std::vector<FlatRange> ranges;  ///< per rank
  std::byte* out = nullptr;       ///< first element of this rank's range
  LocalReduction reduction;
  int tag = 0;
};

/// A reduction: each rank sends every other rank its data in that rank's range, and reduces its own
/// range.
///
/// Messages are short, and a few from each peer are received at once, into blocks of the pool. So
/// summing overlaps with receiving, reads data that is still in the cache, and needs little memory,
/// however large the tensors are.
class ReduceExchange : public Exchange {
 public:
  ReduceExchange(CollectiveName name, std::chrono::milliseconds timeout,
                 std::shared_ptr<BlockPool> pool, const Mailbox& mailbox, ReduceTask task);

  void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }

  /// Posts the first receives and all sends.
  void post_messages();

 protected:
  void complete_outputs() override;
  void complete_inputs() override;

 private:
  struct Arrival {
    BlockPool::Block block;  // destroyed after the transfer that fills it
    Transfer transfer;
  };

  void post_receives(size_t message);
  void send_message(const MessagePlan& plan, size_t message, int peer);
  void reduce_message(const Message& message, std::span<const Arrival> arrivals);
  const std::byte* own_data(const PiecePart& part) const;

  const std::shared_ptr<BlockPool> pool_;
  const Mailbox mailbox_;
  const int64_t element_size_;      // of the elements that are sent
  const int64_t out_element_size_;  // of the elements that are stored
  ReduceTask task_;
  MessagePlan plan_;  // of this rank's range

  // Destroyed after the transfers that use their memory.
  std::vector<at::Tensor> kept_;
  std::vector<BlockPool::Block> packed_;
  std::vector<Transfer> sends_;
  std::deque<std::vector<Arrival>>
      arrivals_;  // of the oldest message not reduced yet, and later ones
  size_t next_receive_ = 0;
};

/// An all-reduce: a reduction of one part per rank, in place, after which each rank sends its part
/// to all others.
class AllReduceExchange : public ReduceExchange {
 public:
  AllReduceExchange(CollectiveName name, std::chrono::milliseconds timeout,
                    std::shared_ptr<BlockPool> pool, const Mailbox& mailbox, ReduceTask task,
                    std::byte* data, int gather_tag);

 private:
  void complete_outputs() override;

  const Mailbox mailbox_;
  const std::vector<FlatRange> ranges_;
  const int64_t element_size_;
  std::byte* const data_;
  const int gather_tag_;
};

}  // namespace tessera
