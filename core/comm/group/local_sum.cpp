#include "comm/group/local_sum.h"

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

#include "base/memory/avx2.h"

namespace tessera {
namespace {

// Elements per block, chosen so that the accumulators stay in the first-level cache. Loops over
// whole blocks have a constant length: GCC vectorizes them even at -O2.
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

using Kernel = void (*)(const LocalReduction&, void* out, std::span<const void* const> inputs,
                        int64_t numel);

// Returns the kernel for inputs and an output of these dtypes; null for unsupported pairs.
template <class Op>
Kernel kernel_of(at::ScalarType dtype, at::ScalarType out_dtype) {
  static const bool has_avx2 = TESSERA_HAS_AVX2;
#define TESSERA_PAIR(name, type, out_name, out_type)                          \
  if (dtype == at::ScalarType::name && out_dtype == at::ScalarType::out_name) \
    return has_avx2 ? reduce_avx2<type, out_type, Op> : reduce_plain<type, out_type, Op>;
#define TESSERA_SAME(name, type) TESSERA_PAIR(name, type, name, type)
  TESSERA_SAME(Float, float)
  TESSERA_SAME(Double, double)
  TESSERA_SAME(BFloat16, c10::BFloat16)
  TESSERA_SAME(Half, c10::Half)
  TESSERA_SAME(Long, int64_t)
  TESSERA_SAME(Int, int32_t)
  TESSERA_SAME(Short, int16_t)
  TESSERA_SAME(Char, int8_t)
  TESSERA_SAME(Byte, uint8_t)
  TESSERA_SAME(Bool, bool)
  TESSERA_PAIR(BFloat16, c10::BFloat16, Float, float)
  TESSERA_PAIR(Half, c10::Half, Float, float)
  TESSERA_PAIR(Float, float, BFloat16, c10::BFloat16)
  TESSERA_PAIR(Float, float, Half, c10::Half)
#undef TESSERA_SAME
#undef TESSERA_PAIR
  return nullptr;
}

Kernel kernel_of(ReduceOp op, at::ScalarType dtype, at::ScalarType out_dtype) {
  if (op == ReduceOp::kMax) return kernel_of<Max>(dtype, out_dtype);
  if (op == ReduceOp::kMin) return kernel_of<Min>(dtype, out_dtype);
  if (c10::isComplexType(dtype) && dtype == out_dtype)  // an element is two reals
    dtype = out_dtype = c10::toRealValueType(dtype);
  return kernel_of<Sum>(dtype, out_dtype);
}

}  // namespace

void reduce_in_order(const LocalReduction& reduction, void* out,
                     std::span<const void* const> inputs, int64_t numel) {
  const Kernel kernel = kernel_of(reduction.op, reduction.dtype, reduction.dtype_of_out());
  TORCH_INTERNAL_ASSERT(kernel && !inputs.empty());
  kernel(reduction, out, inputs, c10::isComplexType(reduction.dtype) ? 2 * numel : numel);
}

void check_reducible(const char* function, at::ScalarType dtype, ReduceOp op,
                     std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType out = out_dtype.value_or(dtype);
  TORCH_CHECK_NOT_IMPLEMENTED(kernel_of(op, dtype, out), "[", function, "] can't ",
                              op == ReduceOp::kSum ? "sum" : "compare", " tensors of dtype ", dtype,
                              out == dtype ? "" : std::string(" into ") + c10::toString(out),
                              "; supported are float, double, bfloat16, half, integers and bool, "
                              "each into its own dtype, and float into bfloat16 or half and back");
}

}  // namespace tessera
