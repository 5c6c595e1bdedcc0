#pragma once

#include <tessera/process_group.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "group/closable.h"
#include "group/collective_form.h"
#include "message/block_pool.h"
#include "message/exchange.h"
#include "message/reduce_exchange.h"
#include "message/sends_messages.h"

namespace tessera {

/// A process group on a c10d backend with tagged messages (Gloo): every collective is a direct
/// exchange between all pairs of ranks.
///
/// [Note: Channels and threads]
/// Gloo's own thread moves the data. A thread per channel, started when needed, sums what has come,
/// in the order in which the channel's collectives were issued. All ranks issue a channel's
/// collectives in one order, so whatever such a thread waits for has been issued before by its
/// peers, or will be without regard to what stands behind it in the queue: it can't deadlock.
/// Between channels no order is known, hence a thread for each.
class ExchangeProcessGroup : public ProcessGroup, public Closable, public SendsMessages {
 public:
  ExchangeProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, std::string backend_name,
                       std::chrono::milliseconds timeout);

  ~ExchangeProcessGroup() override;

  void close() noexcept override;
  int64_t sent_nbytes() const override { return mailbox_.sent_nbytes(); }

  int rank() const override { return mailbox_.rank(); }
  int size() const override { return mailbox_.size(); }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  std::string backend_name() const override { return backend_name_; }

  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag) override;
  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) override;
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) override;
  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) override;
  WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                     const CollectiveTag& tag) override;
  void barrier(const CollectiveTag& tag) override;

 private:
  struct ChannelState {
    std::atomic<int64_t> sequence{0};
    std::shared_ptr<JobThread> thread = std::make_shared<JobThread>();
  };

  ChannelState& channel(const CollectiveTag& tag);
  CollectiveName next_name(const char* collective, const CollectiveTag& tag);
  WorkPtr start(const std::shared_ptr<ReduceExchange>& exchange, const CollectiveTag& tag);
  WorkPtr all_reduce_whole(const at::Tensor& tensor, ReduceOp op, CollectiveName name,
                           const CollectiveTag& tag);
  WorkPtr all_reduce_parts(const at::Tensor& tensor, ReduceOp op, CollectiveName name,
                           const CollectiveTag& tag);

  const ProcessMark mark_;
  Mailbox mailbox_;
  const std::string backend_name_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<BlockPool> pool_;
  std::array<ChannelState, 3> channels_;
};

}  // namespace tessera
