#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/process_group.h>

#include <cstdint>
#include <optional>
#include <span>

namespace tessera {

/// What a local reduction does with `numel` elements of each input.
struct LocalReduction {
  at::ScalarType dtype = at::kFloat;
  ReduceOp op = ReduceOp::kSum;
  double scale = 1.0;       ///< the reduced value is multiplied by this
  bool accumulate = false;  ///< add to what `out` holds
  /// Of what `out` holds; none: `dtype`.
  std::optional<at::ScalarType> out_dtype = std::nullopt;

  at::ScalarType dtype_of_out() const { return out_dtype.value_or(dtype); }
};

/// Reduces `inputs` element by element, in their order, into `out`. An input may be `out` itself.
///
/// Reads each input once and writes `out` once. bfloat16 and half are summed in float and rounded
/// once. The scaled sum of integers is rounded towards zero. Runs on this thread alone and calls no
/// operator of LibTorch, so that it may run beside autograd.
void reduce_in_order(const LocalReduction& reduction, void* out,
                     std::span<const void* const> inputs, int64_t numel);

/// Throws `c10::NotImplementedError` if `dtype` can't be reduced by `op` into `out_dtype`.
void check_reducible(const char* function, at::ScalarType dtype, ReduceOp op,
                     std::optional<at::ScalarType> out_dtype = std::nullopt);

}  // namespace tessera
