#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace tessera {

/// The numbers of one step that are the same for all elements.
struct AdamNumbers {
  double beta1, beta2, eps;
  double l2;                 ///< times the parameter is added to the gradient
  double decay;              ///< the parameter is multiplied by it
  double step_size;          ///< learning rate over the first moment's correction
  double second_correction;  ///< the root of the second moment is multiplied by it
};

/// Elements that lie one after another; no two tensors share memory.
struct AdamPointers {
  void* param;
  const void* grad;
  void *exp_avg, *exp_avg_sq;
  void* rounded;  ///< null for loops that write no rounded values
};
using AdamLoop = void (*)(const AdamNumbers& numbers, const AdamPointers& pointers, int64_t numel);

/// The loop for parameters and gradients of these dtypes; null if there is none. The moments are
/// Float, or Double for Double parameters. `rounded`: writes the parameters a second time, rounded
/// to this dtype, BFloat16 or Half; Float parameters with Float gradients only.
///
/// What it computes for an element depends on nothing but the element: not on its place, not on
/// `numel`, and not on the processor's vectors.
AdamLoop adam_loop(at::ScalarType param, at::ScalarType grad,
                   at::ScalarType rounded = at::ScalarType::Undefined);

}  // namespace tessera
