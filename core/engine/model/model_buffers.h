#pragma once

#include <c10/util/ArrayRef.h>
#include <tessera/engine/fully_shard.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tensor/shard_mesh.h"

namespace tessera {

/// The tensors of a model that every rank has whole, outside of units: the module's buffers, and
/// behind them the parameters that the plan ignores.
class ModelBuffers {
 public:
  ModelBuffers(std::vector<NamedTensor> of_module, const std::vector<NamedTensor>& ignored);

  const std::vector<NamedTensor>& all() const { return all_; }
  c10::ArrayRef<NamedTensor> of_module() const {
    return c10::ArrayRef<NamedTensor>(all_).slice(0, module_count_);
  }
  /// The module's buffers that checkpoints have, and the others.
  c10::ArrayRef<NamedTensor> saved() const { return of_module().slice(0, saved_count_); }
  c10::ArrayRef<NamedTensor> left_out() const { return of_module().slice(saved_count_); }
  c10::ArrayRef<NamedTensor> ignored() const {
    return c10::ArrayRef<NamedTensor>(all_).slice(module_count_);
  }

  /// Leaves buffers with these names out of checkpoints.
  void leave_out(const std::set<std::string>& names);

  /// Gives tensors of a deferred init memory, and all the device and dtype that the plan has for
  /// them.
  void convert(const ShardPlan& plan);
  /// Collective: gives the module's buffers, or the ignored parameters, rank 0's values.
  void broadcast(const ShardMesh& mesh) const;
  void broadcast_ignored(const ShardMesh& mesh) const;

  /// Collective: starts to copy rank 0's buffers of the module to all ranks.
  void start_sync(const ShardMesh& mesh);
  /// Waits for them; does nothing if none are on their way.
  void finish_sync();

 private:
  std::vector<NamedTensor> all_;
  size_t module_count_, saved_count_ = module_count_;
  std::function<void()> arriving_;  // waits for values; null: none are sent
};

}  // namespace tessera
