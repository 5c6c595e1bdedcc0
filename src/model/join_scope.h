#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "mesh/shard_mesh.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// What ranks do together under `join()`.
enum class JoinCall : uint8_t { kDone, kForward, kSettle, kBackward, kClip, kStep, kFailed };

/// Tells the ranks that are done what the others are about to do.
///
/// See [Note: Uneven steps] in join_scope.cpp.
class JoinScope {
 public:
  /// `optimizers`: those that may step.
  JoinScope(const ShardMesh& mesh, std::vector<const torch::optim::Optimizer*> optimizers)
      : mesh_(mesh), optimizers_(std::move(optimizers)) {}

  /// A rank that is not done, before it does `call`. `values`: what the others need for it. Throws
  /// on all ranks if they do different things, or one has failed.
  void announce(JoinCall call, const std::vector<double>& values = {});

  struct Heard {
    JoinCall call;
    std::vector<double> values;
  };
  /// A rank that is done: what the others do next; `kDone` if all are.
  Heard listen();

  /// The optimizer's place among `optimizers`; throws `c10::ValueError` for another.
  size_t index_of(const torch::optim::Optimizer& optimizer) const;

  bool is_done() const { return is_done_; }

 private:
  Heard exchange(JoinCall call, const std::vector<double>& values);

  const ShardMesh& mesh_;
  std::vector<const torch::optim::Optimizer*> optimizers_;
  bool is_done_ = false;
};

}  // namespace tessera
