#pragma once

#include <tessera/comm/process_group.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// The ranks that a model is trained on: a mesh of a shard dim, over which parameters are split,
/// and a replicate dim, over which the shards are replicated (of one rank unless asked for).
///
/// If parameters are DistTensors, more ranks hold other parts of them: the ranks at the same
/// coordinates of meshes like this one. Together they train the parts of one model.
///
/// Rank `r` of the mesh is rank `r % shard().size()` of its shard dim and rank `r / shard().size()`
/// of its replicate dim. The calls below involve all ranks of both dims.
class ShardMesh {
 public:
  /// `replicate` may be null: no replication. `parts` may be null: no DistTensors.
  ShardMesh(ProcessGroupPtr shard, ProcessGroupPtr replicate, ProcessGroupPtr parts = nullptr);

  ProcessGroup& shard() const { return *shard_; }
  ProcessGroup& replicate() const { return *replicate_; }
  ProcessGroup& parts() const { return *parts_; }
  int size() const { return shard_->size() * replicate_->size(); }
  int rank() const { return replicate_->rank() * shard_->size() + shard_->rank(); }
  bool replicates() const { return replicate_->size() > 1; }

  /// Returns this mesh without its replicate dim.
  ShardMesh without_replicas() const { return {shard_, nullptr, parts_}; }

  /// Throws `c10::ValueError` on every rank unless both dims fit together: the ranks of a replicate
  /// dim must have the same rank in their shard dims, and vice versa. Collective.
  void check() const;

  /// Gathers each rank's `bytes`, by rank of the mesh. Collective; blocks.
  std::vector<std::string> all_gather_bytes(const std::string& bytes,
                                            const CollectiveTag& tag) const;
  /// Reduces a small `tensor` of host memory over all ranks. Collective; blocks.
  void all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) const;
  /// Returns true if `value` is true on any rank, those with other parts of DistTensors included.
  /// Collective; blocks.
  bool any(bool value, const CollectiveTag& tag) const;
  /// Copies `tensor` of rank 0 to all. Collective; blocks.
  void broadcast(const at::Tensor& tensor, const CollectiveTag& tag) const;

 private:
  ProcessGroupPtr shard_;
  ProcessGroupPtr replicate_;
  ProcessGroupPtr parts_;
};

/// The ranks of several process groups that cross each other, as those of a mesh do: the ranks of
/// one line have the same rank in all other lines. Rank 0 is rank 0 in all of them; the rank in the
/// first process group varies fastest.
class Ranks {
 public:
  /// The process groups must outlive this.
  explicit Ranks(std::vector<ProcessGroup*> lines);
  /// All ranks that train parts of one model; see `ShardMesh`.
  static Ranks of(const ShardMesh& mesh) {
    return Ranks({&mesh.shard(), &mesh.replicate(), &mesh.parts()});
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const { return lines_.front()->timeout(); }

  /// Gathers each rank's `bytes`, by rank. Collective; blocks.
  std::vector<std::string> all_gather_bytes(const std::string& bytes,
                                            const CollectiveTag& tag) const;

  /// See `check_on_all_ranks()`.
  void check(const std::function<void()>& check, const char* subject) const;

 private:
  std::vector<ProcessGroup*> lines_;
  int rank_ = 0, size_ = 1;
};

/// Runs `check` on every rank; if it throws on any rank, for any reason, all ranks throw: a rank
/// whose check threw rethrows its error, others throw that of the first such rank and name it.
/// Collective: no rank returns before all are done. For checks of local data, and for work that can
/// fail on some ranks only, for which the others would wait. `subject`: for the message of
/// exceptions other than `c10::Error`, such as an error of the file system.
void check_on_all_ranks(const ShardMesh& mesh, const std::function<void()>& check,
                        const char* subject = "tessera");

}  // namespace tessera
