#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <tessera/export.h>

#include <cstdint>

namespace tessera {

/// While an instance lives, an operator on DistTensors that needs shards of other ranks throws
/// `c10::NotImplementedError` on this thread, and in a backward that it runs, instead of gathering
/// them: a softmax along a dim that its function can't reduce in parts, `cat` along a cut dim, or
/// an operator that has no rule for its call and is computed on whole tensors on every rank. The
/// message names the operator, the placements and bytes of its tensors, and, if
/// `distribute_module()` placed it, the module in or after which the operator runs.
///
/// No gathers of this kind are pending reductions, `redistribute()`, `full_tensor()`, the placement
/// of a gradient like its parameter, and a factor of a matrix product that meets the shards of the
/// other factor, as in models whose sequences are cut between their matrices. Without such a guard,
/// each operator, module and placements is warned of once.
///
/// Outside of such a guard, the environment variable `TESSERA_STRICT=1` has the same effect. Guards
/// nest.
class TESSERA_API StrictOperators {
 public:
  explicit StrictOperators(bool strict = true);
  ~StrictOperators();
  StrictOperators(const StrictOperators&) = delete;
  StrictOperators& operator=(const StrictOperators&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

/// Returns a number that stands for the operators which this thread has called on DistTensors since
/// the last call, in their order: for the sizes and placements of their tensors, and for how ranks
/// compute them. It is equal on ranks, in the mesh or not, that run the same program; where it
/// differs, a rank has called another operator, or has placed a tensor otherwise. Sends nothing.
TESSERA_API uint64_t operator_digest();

}  // namespace tessera
