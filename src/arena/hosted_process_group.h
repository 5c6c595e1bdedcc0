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
#include "group/capability.h"
#include "group/collective_name.h"
#include "message/job_thread.h"

namespace tessera {

/// A process group of ranks on several hosts, with the same number of ranks on each. The ranks of a
/// host share memory.
///
/// [Note: Hosts and rails]
/// A rail is the set of ranks with the same index on their hosts, one per host. A gather into
/// shared memory crosses the network once for each host: a rank fetches the slices of its rail's
/// ranks over its rail, and the ranks of one host together fetch all slices. Gathers into other
/// memory and all-reduces cross it as often; the ranks of a host then copy the results from each
/// other. Reductions sum inside the host first and then sum the hosts' results over the rails: in
/// the order of a host's ranks, then of the hosts. Other process groups sum in another order, and
/// messages of bfloat16 or half are rounded once more in between; but the result is the same in
/// every run and on all ranks.
///
/// The steps of a collective run without its caller: a thread per channel, started when needed,
/// runs the collectives of the channel in the order in which they were issued. The steps inside the
/// host get their positions in the arena's order when the collective is issued. So the thread waits
/// only for operations that its peers have issued already, or will issue regardless of the
/// collectives behind this one in the queue.
class HostedProcessGroup : public ProcessGroup,
                           public SharesMemory,
                           public Closable,
                           public SendsMessages {
 public:
  /// `local`: the ranks of this host; `rail`: the ranks of this rank's rail, in host order;
  /// `whole`: all ranks.
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
  /// Returns the other ranks of the rail. An all-to-all sends to all ranks, also inside the host.
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
  /// The parts of a flat buffer that the ranks of this rail own, in host order.
  struct RailCut {
    std::vector<int> ranks;
    std::vector<int64_t> bounds;  // of their parts, concatenated
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

/// Makes a `HostedProcessGroup` of the ranks that `whole` connects, which find each other through
/// `store`. All hosts must have the same number of ranks, at least 2. Collective.
///
/// Throws `c10::NotImplementedError` on every rank, naming the rank and the reason, if the ranks of
/// any host can't share memory.
ProcessGroupPtr hosted_process_group(ProcessGroupPtr whole,
                                     const c10::intrusive_ptr<c10d::Store>& store,
                                     const HostTable& table);

}  // namespace tessera
