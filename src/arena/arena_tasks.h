#pragma once

#include <tessera/process_group.h>

#include <memory>
#include <string>
#include <vector>

#include "arena/arena.h"
#include "arena/arena_reduction.h"

namespace tessera {

/// Waits until all ranks have come, and reads nothing: a barrier, or a gather of shards that lie in
/// shared memory already.
class ArrivalTask final : public ArenaTask {
 public:
  using ArenaTask::ArenaTask;
  bool advance(Arena& arena) override;
};

/// Copies the pieces that each rank shows to where they belong in `flat`.
class GatherTask final : public ArenaTask {
 public:
  GatherTask(ArenaTicket ticket, at::Tensor flat);
  bool advance(Arena& arena) override;

 private:
  void copy_from(const Arena& arena, int rank, const Post& post);

  at::Tensor flat_;
  std::vector<bool> copied_;  // by rank
};

/// Copies what one rank shows to `tensor`, on the others.
class BroadcastTask final : public ArenaTask {
 public:
  BroadcastTask(ArenaTicket ticket, at::Tensor tensor, int root, bool wait_for_readers);
  bool advance(Arena& arena) override;

 private:
  at::Tensor tensor_;
  int root_;
  bool wait_for_readers_;
};

/// Copies what each other rank shows for this one to the tensor of `from` that waits for it. A rank
/// shows a piece for each rank, then one without an address for each that it expects.
class AllToAllTask final : public ArenaTask {
 public:
  AllToAllTask(ArenaTicket ticket, std::vector<at::Tensor> from);
  bool advance(Arena& arena) override;

 private:
  std::string disagreement(const Arena& arena) const;

  std::vector<at::Tensor> from_;
};

/// Reduces one range, or several, into memory of `out`.
class ReduceScatterTask final : public ArenaTask {
 public:
  ReduceScatterTask(ArenaTicket ticket, at::Tensor out, std::vector<ArenaReduction> reductions);
  bool advance(Arena& arena) override;

 private:
  at::Tensor out_;  // keeps the memory
  std::vector<ArenaReduction> reductions_;
};

/// Reduces all of `tensor` in place, out of copies that all ranks show. Large tensors in two turns:
/// each rank reduces a part, into memory that it shows for the next ticket, and takes the others'
/// parts from there.
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
  std::vector<int64_t> bounds_;  // of the parts; empty: one turn
  ArenaTicket second_;
  bool has_reduced_ = false;
};

}  // namespace tessera
