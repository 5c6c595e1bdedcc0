#pragma once

#include <tessera/process_group.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// The ranks that a model is trained on: a mesh of a shard dim, over which parameters are split,
/// and a replicate dim, over which the shards are the same (one rank long unless asked for).
///
/// Parameters that are DistTensors have more ranks, with other parts of them: those with this one's
/// place in both dims. They train parts of one model, each in a mesh like this one.
///
/// Rank `r` of the mesh is rank `r % shard().size()` of its shard dim and rank `r / shard().size()`
/// of its replicate dim. What is agreed on here is agreed on by all ranks of both dims.
class ShardMesh {
 public:
  /// `replicate` may be null: no replication; and so may `parts`: no DistTensors.
  ShardMesh(ProcessGroupPtr shard, ProcessGroupPtr replicate, ProcessGroupPtr parts = nullptr);

  ProcessGroup& shard() const { return *shard_; }
  ProcessGroup& replicate() const { return *replicate_; }
  ProcessGroup& parts() const { return *parts_; }
  int size() const { return shard_->size() * replicate_->size(); }
  int rank() const { return replicate_->rank() * shard_->size() + shard_->rank(); }
  bool replicates() const { return replicate_->size() > 1; }

  /// Throws `c10::ValueError` on every rank unless both dims fit together: the ranks of a replicate
  /// dim have one rank in their shard dims, and the other way round. Collective.
  void check() const;

  /// Each rank's `bytes`, by rank of the mesh. Collective; blocks.
  std::vector<std::string> all_gather_bytes(const std::string& bytes,
                                            const CollectiveTag& tag) const;
  /// Reduces a small `tensor` of host memory over all ranks. Collective; blocks.
  void all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) const;
  /// Copies `tensor` of rank 0 to all. Collective; blocks.
  void broadcast(const at::Tensor& tensor, const CollectiveTag& tag) const;

 private:
  ProcessGroupPtr shard_;
  ProcessGroupPtr replicate_;
  ProcessGroupPtr parts_;
};

/// Runs `check`, which may throw, on every rank; if it throws on any, for whatever reason, all
/// ranks throw, naming the ranks. Collective: no rank returns before all are done. For checks of
/// local data, and for work that can fail on some ranks: without this, the others would wait.
/// `subject`: for the message of what is no `c10::Error`, such as an error of the file system.
void check_on_all_ranks(const ShardMesh& mesh, const std::function<void()>& check,
                        const char* subject = "tessera");

}  // namespace tessera
