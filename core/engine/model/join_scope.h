#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tensor/shard_mesh.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// The collective calls that ranks make under `join()`.
enum class JoinCall : uint8_t {
  kDone,
  kForward,
  kSettle,
  kBackward,
  kReduce,
  kClip,
  kStep,
  kFailed
};

/// Tells the ranks that are done which call the others are about to make.
///
/// See [Note: Uneven steps] in join_scope.cpp.
class JoinScope {
 public:
  /// `optimizers`: those that may step.
  JoinScope(const ShardMesh& mesh, std::vector<const torch::optim::Optimizer*> optimizers)
      : mesh_(mesh), optimizers_(std::move(optimizers)) {}

  /// Called by a rank that is not done, before it makes `call`. `values`: data that the ranks that
  /// are done need for it. Throws on all ranks if ranks make different calls, or one has failed.
  void announce(JoinCall call, const std::vector<double>& values = {});

  struct Heard {
    JoinCall call;
    std::vector<double> values;
  };
  /// Called by a rank that is done: returns the next call of the others; `kDone` if all are done.
  Heard listen();

  /// Returns true if some rank was done at the last call.
  bool is_uneven() const { return is_uneven_; }

  /// Returns the position in `optimizers`; throws `c10::ValueError` for another optimizer.
  size_t index_of(const torch::optim::Optimizer& optimizer) const;

 private:
  Heard exchange(JoinCall call, const std::vector<double>& values);

  const ShardMesh& mesh_;
  std::vector<const torch::optim::Optimizer*> optimizers_;
  bool is_done_ = false, is_uneven_ = false;
};

}  // namespace tessera
