#include "group/local_sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>

#include "memory/avx2.h"

namespace tessera {
namespace {

// Elements per block, chosen so that the accumulators stay in the first-level cache. Loops over
// whole blocks have a constant length, which GCC vectorizes even at -O2.
constexpr int64_t kBlock = 512;

template <class T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

struct Sum {
  template <class A>
  static TESSERA_INLINE A combine(A a, A b) {
    if constexpr (std::is_same_v<A, bool>) {
      return a || b;
    } else if constexpr (std::is_integral_v<A>) {
      // Wraps around on overflow, as LibTorch's sums do.
      return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) +
                            static_cast<std::make_unsigned_t<A>>(b));
    } else {
      return a + b;
    }
  }
};
struct Max {
  template <class A>
  static TESSERA_INLINE A combine(A a, A b) {
    return a > b || a != a ? a : b;  // NaN wins
  }
};
struct Min {
  template <class A>
  static TESSERA_INLINE A combine(A a, A b) {
    return a < b || a != a ? a : b;
  }
};

template <class T, class A>
TESSERA_INLINE void store(T* out, const A* values, int64_t numel, double scale, bool accumulate) {
  const auto factor = static_cast<std::conditional_t<std::is_integral_v<A>, double, A>>(scale);
  if (scale == 1.0 && !accumulate) {
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i) out[i] = static_cast<T>(values[i]);
  } else if (scale == 1.0) {
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i)
      out[i] = static_cast<T>(Sum::combine(static_cast<A>(out[i]), values[i]));
  } else if (!accumulate) {
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i) out[i] = static_cast<T>(static_cast<A>(values[i] * factor));
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i)
      out[i] =
          static_cast<T>(Sum::combine(static_cast<A>(out[i]), static_cast<A>(values[i] * factor)));
  }
}

template <class T, class Op, class A>
TESSERA_INLINE void combine_inputs(A* values, std::span<const void* const> inputs, int64_t begin,
                                   int64_t numel) {
  const T* first = static_cast<const T*>(inputs[0]) + begin;
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<A>(first[i]);
  for (size_t k = 1; k < inputs.size(); ++k) {
    const T* input = static_cast<const T*>(inputs[k]) + begin;
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i)
      values[i] = Op::template combine<A>(values[i], static_cast<A>(input[i]));
  }
}

template <class T, class Out, class Op>
TESSERA_INLINE void reduce_block(const LocalReduction& reduction, void* out,
                                 std::span<const void* const> inputs, int64_t begin,
                                 int64_t numel) {
  Accumulator<T> values[kBlock];
  combine_inputs<T, Op>(values, inputs, begin, numel);
  store(static_cast<Out*>(out) + begin, values, numel, reduction.scale, reduction.accumulate);
}

template <class T, class Out, class Op>
TESSERA_INLINE void reduce_all(const LocalReduction& reduction, void* out,
                               std::span<const void* const> inputs, int64_t begin, int64_t numel) {
  for (; begin + kBlock <= numel; begin += kBlock) {
    reduce_block<T, Out, Op>(reduction, out, inputs, begin, kBlock);
  }
  if (begin < numel) {
    reduce_block<T, Out, Op>(reduction, out, inputs, begin, numel - begin);
  }
}

// Sums of at least this size are written past the caches: they are read much later, and fetching
// the memory that they overwrite would cost as much as reading an input. Shorter sums may be read
// while they are still in the caches.
constexpr int64_t kStreamBytes = int64_t{256} << 10;

// Computes whole cache lines of such a sum, from its start; returns the number of elements
// computed. Keeps no accumulators in memory, so that the processor prefetches from all inputs at
// once.
template <class T>
TESSERA_TARGET_AVX2 int64_t stream_sum(const LocalReduction& reduction, void* out,
                                       std::span<const void* const> inputs, int64_t numel) {
#if defined(__x86_64__)
  using Vector [[gnu::vector_size(32), gnu::aligned(alignof(T)), gnu::may_alias]] = T;
  constexpr int64_t kItems = sizeof(Vector) / sizeof(T);
  const bool is_aligned = reinterpret_cast<uintptr_t>(out) % sizeof(__m256i) == 0;
  if (reduction.accumulate || !is_aligned || numel * int64_t{sizeof(T)} < kStreamBytes) return 0;
  const auto factor = static_cast<T>(reduction.scale);
  const auto input = [&](size_t k, int64_t at) TESSERA_TARGET_AVX2 {
    return *reinterpret_cast<const Vector*>(static_cast<const T*>(inputs[k]) + at);
  };
  int64_t begin = 0;
  for (; begin + 2 * kItems <= numel; begin += 2 * kItems) {
    Vector low = input(0, begin), high = input(0, begin + kItems);
    for (size_t k = 1; k < inputs.size(); ++k) {
      low += input(k, begin);
      high += input(k, begin + kItems);
    }
    auto* const line = reinterpret_cast<__m256i*>(static_cast<T*>(out) + begin);
    _mm256_stream_si256(line, reinterpret_cast<__m256i>(low * factor));
    _mm256_stream_si256(line + 1, reinterpret_cast<__m256i>(high * factor));
  }
  _mm_sfence();
  return begin;
#else
  return 0;
#endif
}

template <class T, class Out, class Op>
TESSERA_TARGET_AVX2 void reduce_avx2(const LocalReduction& reduction, void* out,
                                     std::span<const void* const> inputs, int64_t numel) {
  int64_t begin = 0;
  if constexpr (std::is_same_v<T, Out> && std::is_floating_point_v<T> && std::is_same_v<Op, Sum>)
    begin = stream_sum<T>(reduction, out, inputs, numel);
  reduce_all<T, Out, Op>(reduction, out, inputs, begin, numel);
}

template <class T, class Out, class Op>
void reduce_plain(const LocalReduction& reduction, void* out, std::span<const void* const> inputs,
                  int64_t numel) {
  reduce_all<T, Out, Op>(reduction, out, inputs, 0, numel);
}

template <class T, class Out, class Op>
void reduce_typed(const LocalReduction& reduction, void* out, std::span<const void* const> inputs,
                  int64_t numel) {
  static const bool has_avx2 = TESSERA_HAS_AVX2;
  (has_avx2 ? reduce_avx2<T, Out, Op> : reduce_plain<T, Out, Op>)(reduction, out, inputs, numel);
}

// Reduces into an `out` of another dtype than the inputs; returns false for unsupported pairs.
template <class Op>
bool reduce_mixed(const LocalReduction& reduction, void* out, std::span<const void* const> inputs,
                  int64_t numel) {
  using c10::BFloat16, c10::Half;
  const auto is = [&](at::ScalarType dtype, at::ScalarType out_dtype) {
    return reduction.dtype == dtype && reduction.dtype_of_out() == out_dtype;
  };
  if (is(at::kBFloat16, at::kFloat)) {
    reduce_typed<BFloat16, float, Op>(reduction, out, inputs, numel);
  } else if (is(at::kHalf, at::kFloat)) {
    reduce_typed<Half, float, Op>(reduction, out, inputs, numel);
  } else if (is(at::kFloat, at::kBFloat16)) {
    reduce_typed<float, BFloat16, Op>(reduction, out, inputs, numel);
  } else if (is(at::kFloat, at::kHalf)) {
    reduce_typed<float, Half, Op>(reduction, out, inputs, numel);
  } else {
    return false;
  }
  return true;
}

template <class Op>
bool reduce_dtype(const LocalReduction& reduction, void* out, std::span<const void* const> inputs,
                  int64_t numel) {
  if (reduction.dtype_of_out() != reduction.dtype)
    return reduce_mixed<Op>(reduction, out, inputs, numel);
  switch (reduction.dtype) {
#define TESSERA_CASE(name, type)                                 \
  case at::ScalarType::name:                                     \
    reduce_typed<type, type, Op>(reduction, out, inputs, numel); \
    return true;
    TESSERA_CASE(Float, float)
    TESSERA_CASE(Double, double)
    TESSERA_CASE(BFloat16, c10::BFloat16)
    TESSERA_CASE(Half, c10::Half)
    TESSERA_CASE(Long, int64_t)
    TESSERA_CASE(Int, int32_t)
    TESSERA_CASE(Short, int16_t)
    TESSERA_CASE(Char, int8_t)
    TESSERA_CASE(Byte, uint8_t)
    TESSERA_CASE(Bool, bool)
#undef TESSERA_CASE
    default:
      return false;
  }
}

bool reduce_op(const LocalReduction& reduction, void* out, std::span<const void* const> inputs,
               int64_t numel) {
  switch (reduction.op) {
    case ReduceOp::kSum:
      if (c10::isComplexType(reduction.dtype) && reduction.dtype_of_out() == reduction.dtype) {
        LocalReduction parts = reduction;  // a complex element is two reals
        parts.out_dtype.reset();
        parts.dtype = c10::toRealValueType(reduction.dtype);
        return reduce_dtype<Sum>(parts, out, inputs, 2 * numel);
      }
      return reduce_dtype<Sum>(reduction, out, inputs, numel);
    case ReduceOp::kMax:
      return reduce_dtype<Max>(reduction, out, inputs, numel);
    case ReduceOp::kMin:
      return reduce_dtype<Min>(reduction, out, inputs, numel);
  }
  return false;
}

}  // namespace

void reduce_in_order(const LocalReduction& reduction, void* out,
                     std::span<const void* const> inputs, int64_t numel) {
  TORCH_INTERNAL_ASSERT(!inputs.empty() && reduce_op(reduction, out, inputs, numel));
}

void check_reducible(const char* function, at::ScalarType dtype, ReduceOp op,
                     std::optional<at::ScalarType> out_dtype) {
  char nothing = 0;
  const void* inputs[] = {&nothing};
  if (out_dtype == dtype) out_dtype.reset();
  const bool known =
      reduce_op({.dtype = dtype, .op = op, .out_dtype = out_dtype}, &nothing, inputs, 0);
  TORCH_CHECK_NOT_IMPLEMENTED(known, "[", function, "] can't ",
                              op == ReduceOp::kSum ? "sum" : "compare", " tensors of dtype ", dtype,
                              out_dtype ? std::string(" into ") + c10::toString(*out_dtype) : "",
                              "; supported are float, double, bfloat16, half, integers and bool, each into "
                              "its own dtype, and float into bfloat16 or half and back");
}

}  // namespace tessera
