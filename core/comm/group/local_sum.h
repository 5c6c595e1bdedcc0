#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/comm/process_group.h>

#include <cstdint>
#include <optional>
#include <span>

namespace tessera {

/// The parameters of a local reduction.
struct LocalReduction {
  at::ScalarType dtype = at::kFloat;
  ReduceOp op = ReduceOp::kSum;
  double scale = 1.0;       ///< factor applied to the reduced value
  bool accumulate = false;  ///< add to the values in `out` instead of overwriting
  /// The dtype of `out`; defaults to `dtype`.
  std::optional<at::ScalarType> out_dtype = std::nullopt;

  at::ScalarType dtype_of_out() const { return out_dtype.value_or(dtype); }
};

/// Reduces the first `numel` elements of `inputs` into `out`, element by element and in the order
/// of the inputs. An input may be `out` itself.
///
/// Reads each input once and writes `out` once. bfloat16 and half are summed in float and rounded
/// once. The scaled sum of integers is rounded towards zero. Runs on the calling thread alone and
/// calls no LibTorch operator, so it may run concurrently with autograd.
void reduce_in_order(const LocalReduction& reduction, void* out,
                     std::span<const void* const> inputs, int64_t numel);

/// Throws `c10::NotImplementedError` if `dtype` can't be reduced by `op` into `out_dtype`.
void check_reducible(const char* function, at::ScalarType dtype, ReduceOp op,
                     std::optional<at::ScalarType> out_dtype = std::nullopt);

}  // namespace tessera
