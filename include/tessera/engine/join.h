#pragma once

#include <tessera/engine/sharded_optimizer.h>
#include <tessera/export.h>

#include <functional>
#include <vector>

namespace tessera {

/// Runs `train`, in which ranks may take different numbers of steps, as when their data does not
/// divide evenly. A rank that has finished takes part in the collectives of the others until all
/// have finished: it contributes nothing to their reductions, and steps the parameters that it owns
/// with their options, such as learning rates (of a class of optimizer that Tessera does not know,
/// with the learning rates alone).
///
/// Collective. In `train` the ranks that have not finished must make the same calls in the same
/// order: backwards, also under `no_sync()`, `reduce()`, clipping, and steps of `optimizers`;
/// forwards, if the plan synchronizes buffers. Other collective calls (`full_grad`, `full_state`,
/// checkpoints, `GradScaler`, `ExponentialAverage`) throw, and so does `local_grad`. Gradients are
/// still divided by the number of all ranks. The options of a rank's own optimizers stay as they
/// were when it finished, and its schedulers with them: step these afterwards as often as the other
/// ranks did, or set the options alike, and freeze and thaw what they did. The next backward checks
/// that all ranks have stepped with the same options.
///
/// **Throws** `c10::NotImplementedError` where parameters are freed between uses (`kParameters` on
/// several hosts, or over messages), and with `reduce_gradients = false`; `c10::Error` on all ranks
/// if `train` throws on one (which throws its own error) or if ranks make different calls.
TESSERA_API void join(const ShardedModule& module, const std::vector<ShardedOptimizer*>& optimizers,
                      const std::function<void()>& train);

}  // namespace tessera
