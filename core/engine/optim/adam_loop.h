#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace tessera {

/// The numbers of one step that are the same for all elements.
struct AdamNumbers {
  double beta1, beta2, eps;
  double l2;                 ///< this times the parameter is added to the gradient
  double decay;              ///< the parameter is multiplied by this
  double step_size;          ///< learning rate / bias correction of the first moment
  double second_correction;  ///< the root of the second moment is multiplied by this
};

/// Pointers to contiguous elements; no two tensors share memory.
struct AdamPointers {
  void* param;
  const void* grad;
  void *exp_avg, *exp_avg_sq;
  void* rounded;  ///< null for loops that write no rounded values
};
using AdamLoop = void (*)(const AdamNumbers& numbers, const AdamPointers& pointers, int64_t numel);

/// Returns the loop for parameters and gradients of these dtypes; null if there is none. The
/// moments are Float, or Double for Double parameters. `rounded`: the loop also writes the
/// parameters rounded to this dtype, BFloat16 or Half; for Float parameters with Float gradients
/// only.
///
/// The result for an element depends on nothing but the element: not on its place, not on `numel`,
/// and not on the processor's vectors.
AdamLoop adam_loop(at::ScalarType param, at::ScalarType grad,
                   at::ScalarType rounded = at::ScalarType::Undefined);

}  // namespace tessera
