#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/collective.h>

namespace tessera {

/// Stores `sum`, of a reduce-scatter, in `target`, or adds it, as `options` say. For process groups
/// that sum by LibTorch's operators. Computes in the wider of the two dtypes, numbers of 16 bits in
/// float, and rounds once.
inline void store_sum(const at::Tensor& target, at::Tensor sum,
                      const ReduceScatterOptions& options) {
  auto dtype = c10::promoteTypes(sum.scalar_type(), target.scalar_type());
  if (c10::isReducedFloatingType(dtype)) dtype = at::kFloat;
  sum = sum.to(dtype);
  if (options.scale != 1.0) {  // integers are scaled in double; to() drops the fractions
    sum = at::isFloatingType(dtype) || at::isComplexType(dtype)
              ? sum.mul(options.scale)
              : sum.to(at::kDouble).mul(options.scale).to(dtype);
  }
  options.accumulate ? target.add_(sum) : target.copy_(sum);
}

}  // namespace tessera
