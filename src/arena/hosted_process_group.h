#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/process_group.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "arena/arena_process_group.h"
#include "arena/host_buffer.h"
#include "arena/host_table.h"
#include "arena/stepwise_work.h"
#include "group/channel_order.h"
#include "group/closable.h"
#include "message/job_thread.h"
#include "group/sends_messages.h"
#include "group/shares_memory.h"

namespace tessera {

/// A process group of ranks on several hosts, equally many on each, that share memory with the
/// others of their host.
///
/// [Note: Hosts and rails]
/// A rail is the ranks that have the same place on their hosts, one of each. What is gathered into
/// shared memory goes over the network once for each host: a rank fetches, over its rail, the
/// slices of the ranks of its rail, and those of one host together have them all. So does what is
/// gathered elsewhere, or reduced by all, which ranks of a host then copy from each other. What is
/// reduced is summed inside the host first, and the sums of the hosts over the rails: in the order
/// of the ranks of a host, then of the hosts. That is not the order of other process groups, and
/// messages of bfloat16 or half are rounded once more between; but it is the same in every run and
/// on all ranks.
///
/// The steps of a collective follow on each other without its caller: a thread per channel, started
/// when needed, takes the collectives of the channel in the order in which they were issued. What a
/// step does inside the host has its place in the order of the arena from the call on. So all that
/// such a thread waits for was issued by its peers before, or will be without regard to what
/// stands behind it in the queue.
class HostedProcessGroup : public ProcessGroup,
                           public SharesMemory,
                           public Closable,
                           public SendsMessages {
 public:
  /// `local`: the ranks of this host; `rail`: those of this rank's rail, by host; `whole`: all.
  HostedProcessGroup(HostTable table, std::shared_ptr<ArenaProcessGroup> local,
                     ProcessGroupPtr rail, ProcessGroupPtr whole);
  ~HostedProcessGroup() override;

  void close() noexcept override;
  int64_t sent_nbytes() const override;

  int rank() const override { return whole_->rank(); }
  int size() const override { return whole_->size(); }
  std::chrono::milliseconds timeout() const override { return whole_->timeout(); }
  std::string backend_name() const override { return "arena+" + whole_->backend_name(); }
  bool needs_host_memory() const override { return true; }
  /// The other ranks of the rail. An all-to-all sends to all, also inside the host.
  std::vector<int> sends_to() const override;

  std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) override;
  void release(const SharedBuffer& buffer) override;

 private:
  WorkPtr issue(Collective collective) override;
  WorkPtr start(AllGather& call, const CollectiveTag& tag);
  WorkPtr start(ReduceScatter& call, const CollectiveTag& tag);
  WorkPtr start(AllReduce& call, const CollectiveTag& tag);
  WorkPtr start(Broadcast& call, const CollectiveTag& tag);
  WorkPtr start(AllToAll& call, const CollectiveTag& tag) { return start_on(*whole_, call, tag); }
  WorkPtr start(Barrier& call, const CollectiveTag& tag) { return start_on(*whole_, call, tag); }

  int host() const { return table_.host_of(rank()); }
  int index() const { return table_.index_of(rank()); }
  template <class Call>
  static WorkPtr start_on(ProcessGroup& process_group, Call& call, const CollectiveTag& tag) {
    return issue_on(process_group, {tag, std::move(call)});
  }
  WorkPtr start_steps(const char* collective, const CollectiveTag& tag,
                      std::vector<StepwiseWork::Step> steps);
  /// What of a flat buffer the ranks of this rail own, by host.
  struct RailCut {
    std::vector<int> ranks;
    std::vector<int64_t> bounds;  // of what they own, put together
  };
  RailCut cut_for_rail(std::span<const int64_t> bounds) const;
  WorkPtr gather_own(const AllGather& call, const CollectiveTag& tag);
  WorkPtr gather_shared(HostBuffer& buffer, const AllGather& call, const CollectiveTag& tag);
  WorkPtr all_reduce_whole(const AllReduce& call, const CollectiveTag& tag);
  WorkPtr all_reduce_parts(const AllReduce& call, const CollectiveTag& tag);
  std::vector<ByteRange> foreign_ranges(size_t begin, int64_t item,
                                        std::span<const int64_t> bounds) const;

  const HostTable table_;
  const std::shared_ptr<ArenaProcessGroup> local_;
  const ProcessGroupPtr rail_;
  const ProcessGroupPtr whole_;
  ChannelOrder order_;
  std::array<JobThread, 3> threads_;  // by channel
  SharedBuffers<HostBuffer> buffers_;
};

/// Makes such a process group of the ranks that `whole` connects and that find each other through
/// `store`; all hosts must have the same number of ranks, at least 2. Collective.
///
/// Throws `c10::NotImplementedError`, on every rank, naming the rank and the reason, where ranks of
/// a host can't share memory.
ProcessGroupPtr hosted_process_group(ProcessGroupPtr whole,
                                     const c10::intrusive_ptr<c10d::Store>& store,
                                     const HostTable& table);

}  // namespace tessera
