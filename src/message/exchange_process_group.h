#pragma once

#include <tessera/process_group.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "group/channel_order.h"
#include "group/closable.h"
#include "group/collective_form.h"
#include "group/sends_messages.h"
#include "message/block_pool.h"
#include "message/exchange.h"
#include "message/reduce_exchange.h"

namespace tessera {

/// A process group on a c10d backend with tagged messages (Gloo): every collective is a direct
/// exchange between all pairs of ranks.
///
/// [Note: Channels and threads]
/// Gloo's own thread moves the data. A thread per channel, started when needed, sums the received
/// data, in the order in which the channel's collectives were issued. All ranks issue a channel's
/// collectives in one order, so the messages that such a thread waits for have been issued by its
/// peers already, or will be, regardless of later collectives in the queue: it can't deadlock.
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
  bool needs_host_memory() const override { return true; }

 private:
  WorkPtr issue(Collective collective) override;

  // Start a collective, given its name and the form that ranks must agree on. Each posts its
  // messages.
  WorkPtr start(AllGather& call, CollectiveName name, const CollectiveForm& form);
  WorkPtr start(ReduceScatter& call, CollectiveName name, const CollectiveForm& form);
  WorkPtr start(AllReduce& call, CollectiveName name, const CollectiveForm& form);
  WorkPtr start(Broadcast& call, CollectiveName name, const CollectiveForm& form);
  WorkPtr start(AllToAll& call, CollectiveName name, const CollectiveForm& form);
  WorkPtr start(Barrier& call, CollectiveName name, const CollectiveForm& form);

  WorkPtr all_reduce_whole(AllReduce& call, CollectiveName name, const CollectiveForm& form);
  WorkPtr all_reduce_parts(AllReduce& call, CollectiveName name, const CollectiveForm& form);
  WorkPtr start_reduction(const std::shared_ptr<ReduceExchange>& exchange, Channel channel);
  /// Posts messages by `post`; waiting for the work completes them.
  template <class Post>
  WorkPtr transfer(CollectiveName name, bool wait_for_sends, const Post& post);
  const std::shared_ptr<JobThread>& thread(Channel channel) const;

  ChannelOrder order_;
  Mailbox mailbox_;
  const std::string backend_name_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<BlockPool> pool_;
  std::array<std::shared_ptr<JobThread>, 3> threads_;  // by channel
};

}  // namespace tessera
