#pragma once

#include <tessera/export.h>
#include <tessera/sharded_optimizer.h>

#include <functional>
#include <vector>

namespace tessera {

/// Runs `train`, in which ranks may take different numbers of steps, as when their data does not
/// divide evenly. A rank that is done keeps the others company until all are: it takes part in
/// their reductions with nothing of its own, and steps what it owns with their learning rates.
///
/// Collective. In `train` the ranks that are not done must call the same things in the same order:
/// backwards, also under `no_sync()`, `reduce()`, clipping, and steps of `optimizers`; forwards, if
/// the plan synchronizes buffers. Collective calls beside these (`full_grad`, `full_state`,
/// checkpoints, `GradScaler`) throw. Gradients are still divided by the number of all ranks.
/// Schedulers of a rank that is done stand still; save from one that was not, or step them after.
///
/// **Throws** `c10::NotImplementedError` where parameters are freed between uses (`kParameters` on
/// several hosts, or over messages); `c10::Error` on all ranks if `train` throws on one (which
/// throws its own error) or if ranks call different things.
TESSERA_API void join(const ShardedModule& module, const std::vector<ShardedOptimizer*>& optimizers,
                      const std::function<void()>& train);

}  // namespace tessera
