#pragma once

#include <tessera/engine/sharded_optimizer.h>

#include <memory>
#include <utility>

#include "python_optimizer.h"

namespace tessera::python {

/// A `ShardedOptimizer` over an optimizer of Python. That chooses its own operators: `fused` has no
/// effect.
class ShardedPythonOptimizer {
 public:
  ShardedPythonOptimizer(const ShardedModule& model, std::unique_ptr<PythonOptimizer> inner,
                         const ShardedOptimizerOptions& options)
      : inner_(std::move(inner)),
        sharded_(std::make_shared<ShardedOptimizer>(model, *inner_, options)) {
    inner_->note_parts();
  }

  /// Returns `use` of the engine's optimizer, with the param groups that Python has then.
  template <class Use>
  auto use(const Use& use) {
    inner_->take_groups();
    return inner_->lend(*sharded_, use);
  }

  PythonOptimizer& inner() { return *inner_; }

 protected:
  /// `sharded` steps `inner`.
  ShardedPythonOptimizer(std::unique_ptr<PythonOptimizer> inner,
                         std::shared_ptr<ShardedOptimizer> sharded)
      : inner_(std::move(inner)), sharded_(std::move(sharded)) {
    inner_->note_parts();
  }

 private:
  std::unique_ptr<PythonOptimizer> inner_;
  std::shared_ptr<ShardedOptimizer> sharded_;  // ends first
};

}  // namespace tessera::python
