#pragma once

#include <tessera/comm/process_group.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/arena/arena.h"
#include "comm/arena/shared_buffers.h"
#include "comm/group/capability.h"
#include "comm/group/collective_form.h"
#include "comm/group/local_sum.h"

namespace tessera {

/// A part of a reduction: elements [begin, end) of the pieces of all ranks, reduced in rank order.
struct ArenaReduction {
  int64_t begin = 0, end = 0;
  std::byte* out = nullptr;  ///< receives the range; its first element
  LocalReduction reduction;
};

/// A process group of the ranks of one host. Its collectives go through an `Arena`.
class ArenaProcessGroup : public ProcessGroup,
                          public SharesMemory,
                          public Closable,
                          public Watchable {
 public:
  explicit ArenaProcessGroup(std::shared_ptr<Arena> arena);
  ~ArenaProcessGroup() override;

  void close() noexcept override;

  int rank() const override { return arena_->rank(); }
  int size() const override { return arena_->size(); }
  std::chrono::milliseconds timeout() const override { return arena_->timeout(); }
  std::string backend_name() const override { return "arena"; }
  std::vector<int> sends_to() const override { return {}; }

  std::optional<c10::DeviceType> device_type() const override { return at::kCPU; }

  std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) override;
  /// Does nothing: there are no shards of other hosts.
  void release(const SharedBuffer& /*buffer*/) override {}

  void set_watch(std::shared_ptr<CollectiveWatch> watch) override {
    arena_->set_watch(std::move(watch));
  }
  const std::shared_ptr<CollectiveWatch>& watch() const override { return arena_->watch(); }

  /// For collectives that span several hosts; see `hosted_process_group()`.
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  /// Makes memory of `nbytes` that all ranks map; returns null on all ranks if one of them can't.
  /// Reserves its pages now if `reserve`. Collective; blocks.
  std::shared_ptr<SharedMemory> share_memory(int64_t nbytes, bool reserve,
                                             const CollectiveTag& tag);
  /// Starts an arrival with a ticket taken earlier: waits until all ranks have come, and reads
  /// nothing. It is a barrier, or a gather of shards that are already in shared memory.
  WorkPtr arrive_at(ArenaTicket ticket);
  /// Starts a gather of the `pieces` of all ranks into `flat`, with a ticket taken earlier.
  WorkPtr gather_at(ArenaTicket ticket, const std::vector<Piece>& pieces, const at::Tensor& flat);
  /// Starts a broadcast with a ticket taken earlier.
  WorkPtr broadcast_at(ArenaTicket ticket, const at::Tensor& tensor, int root);
  /// Starts a reduction of the `pieces` of all ranks. This rank computes the ranges that
  /// `reductions` list, into memory of `out`.
  WorkPtr reduce(const at::Tensor& out, const std::vector<Piece>& pieces,
                 std::vector<ArenaReduction> reductions, const CollectiveForm& form,
                 const CollectiveTag& tag);

 private:
  // Memory that all ranks map. Its number is the same on all of them.
  struct NumberedBuffer {
    std::shared_ptr<SharedMemory> memory;
    int64_t number = 0;
  };

  WorkPtr issue(Collective collective) override;
  WorkPtr start(AllGather& call, const CollectiveTag& tag);
  WorkPtr start(ReduceScatter& call, const CollectiveTag& tag);
  WorkPtr start(AllReduce& call, const CollectiveTag& tag);
  WorkPtr start(Broadcast& call, const CollectiveTag& tag);
  WorkPtr start(AllToAll& call, const CollectiveTag& tag);
  WorkPtr start(Barrier& call, const CollectiveTag& tag);

  /// Publishes the pieces in place that the other ranks can reach, and copies of the rest, or of
  /// all if `copies_all`.
  void show_pieces(const ArenaTicket& ticket, const std::vector<Piece>& pieces,
                   bool copies_all = false);

  const std::shared_ptr<Arena> arena_;
  std::atomic<int64_t> next_buffer_ = 0;
  SharedBuffers<NumberedBuffer> buffers_;
};

/// As the public function, with the key of `shake_hands()`.
ProcessGroupPtr arena_process_group(ProcessGroupPtr inner, const std::string& key);

}  // namespace tessera
