#pragma once

#include <tessera/process_group.h>

#include <memory>
#include <string>
#include <vector>

#include "arena/arena.h"
#include "arena/arena_reduction.h"

namespace tessera {

/// Waits until all ranks have arrived, and reads nothing: a barrier, or a gather of shards that are
/// already in shared memory.
class ArrivalTask final : public ArenaTask {
 public:
  using ArenaTask::ArenaTask;
  bool advance(Arena& arena) override;
};

/// Copies the pieces that each rank published to their positions in `flat`.
class GatherTask final : public ArenaTask {
 public:
  GatherTask(ArenaTicket ticket, at::Tensor flat);
  bool advance(Arena& arena) override;

 private:
  void copy_from(const Arena& arena, int rank, const Post& post);

  at::Tensor flat_;
  std::vector<bool> copied_;  // by rank
};

/// Copies the root's tensor to `tensor` on the other ranks.
class BroadcastTask final : public ArenaTask {
 public:
  BroadcastTask(ArenaTicket ticket, at::Tensor tensor, int root, bool wait_for_readers);
  bool advance(Arena& arena) override;

 private:
  at::Tensor tensor_;
  int root_;
  bool wait_for_readers_;
};

/// Copies the message that each other rank published for this one to its tensor in `from`. A rank
/// publishes a piece for each rank, then one without an address for each message that it expects.
class AllToAllTask final : public ArenaTask {
 public:
  AllToAllTask(ArenaTicket ticket, std::vector<at::Tensor> from);
  bool advance(Arena& arena) override;

 private:
  std::string disagreement(const Arena& arena) const;

  std::vector<at::Tensor> from_;
};

/// Reduces one or more ranges into memory of `out`.
class ReduceScatterTask final : public ArenaTask {
 public:
  ReduceScatterTask(ArenaTicket ticket, at::Tensor out, std::vector<ArenaReduction> reductions);
  bool advance(Arena& arena) override;

 private:
  at::Tensor out_;  // keeps the memory alive
  std::vector<ArenaReduction> reductions_;
};

/// Reduces all of `tensor` in place, from copies that all ranks published. Large tensors take two
/// rounds: each rank reduces one part into memory that it publishes for the next ticket, and copies
/// the other ranks' parts from theirs.
class AllReduceTask final : public ArenaTask {
 public:
  AllReduceTask(ArenaTicket ticket, at::Tensor tensor, ReduceOp op, std::vector<int64_t> bounds);
  bool advance(Arena& arena) override;
  const ArenaTicket& awaited() const override { return has_reduced_ ? second_ : ticket_; }

 private:
  void reduce_part(Arena& arena);
  void take_parts(Arena& arena);

  at::Tensor tensor_;
  LocalReduction reduction_;
  std::vector<int64_t> bounds_;  // of the parts; empty: one round
  ArenaTicket second_;
  bool has_reduced_ = false;
};

}  // namespace tessera
