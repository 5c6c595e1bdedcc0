#pragma once

#include <tessera/process_group.h>

#include <functional>
#include <string>
#include <vector>

#include "mesh/shard_mesh.h"

namespace tessera {

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

}  // namespace tessera
