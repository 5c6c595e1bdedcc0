#include "optim/adam_loop.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

// Compiles a loop twice, and takes the AVX2 one where the processor has it; see comm/local_sum.cpp.
#if defined(__x86_64__) && defined(__GNUC__)
#define TESSERA_TARGET_AVX2 __attribute__((target("avx2")))
#define TESSERA_HAS_AVX2 (__builtin_cpu_supports("avx2") != 0)
#else
#define TESSERA_TARGET_AVX2
#define TESSERA_HAS_AVX2 false
#endif
#define TESSERA_INLINE inline __attribute__((always_inline))

// [Note: Bits of a step]
//
// Vectors and the single elements at the end of a tensor must get the same bits: then it does not
// matter where ranks and threads cut. IEEE sums, products, quotients and square roots are correctly
// rounded in both; only a product that is fused with a sum would differ where the compiler fuses
// one and not the other. So this file is compiled with -ffp-contract=off (CMakeLists.txt). The step
// waits for memory: it is no slower.
namespace tessera {
namespace {

// Elements per call of the innermost loop, whose length is constant: GCC vectorizes it at -O2, too.
constexpr int64_t kBlock = 256;

template <class P>
using Moment = std::conditional_t<std::is_same_v<P, double>, double, float>;

template <class A, class T>
TESSERA_INLINE A widen(T value) {
  return static_cast<A>(value);
}
template <class T, class A>
TESSERA_INLINE T narrow(A value) {
  return static_cast<T>(value);
}

// c10's conversions of Half have branches. These are the same numbers without any, for vectors.
constexpr uint32_t kInfinity = 0x7f800000;
template <>
TESSERA_INLINE float widen(c10::Half value) {
  const uint32_t bits = value.x, magnitude = (bits & 0x7fff) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112F;  // the exponents' biases
  const uint32_t result =
      magnitude >= 0x7c00U << 13 ? magnitude | kInfinity : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(result | (bits & 0x8000) << 16);
}
template <>
TESSERA_INLINE c10::Half narrow(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint32_t half = std::bit_cast<uint32_t>(0.5F);
  const uint32_t normal = (magnitude - (112U << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // The sum rounds to multiples of the smallest Half.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - half;
  const uint32_t special = magnitude > kInfinity ? 0x7e00 : 0x7c00;
  uint32_t result = magnitude < 113U << 23 ? subnormal : normal;
  result = magnitude >= 143U << 23 ? special : result;
  return c10::Half(static_cast<uint16_t>(result | (bits >> 16 & 0x8000)), c10::Half::from_bits());
}

template <bool kL2, class P, class G, class A>
TESSERA_INLINE void step_block(const AdamNumbers& numbers, P* __restrict param,
                               const G* __restrict grad, A* __restrict exp_avg,
                               A* __restrict exp_avg_sq, int64_t numel) {
  const auto beta1 = static_cast<A>(numbers.beta1), rest1 = static_cast<A>(1 - numbers.beta1);
  const auto beta2 = static_cast<A>(numbers.beta2), rest2 = static_cast<A>(1 - numbers.beta2);
  const auto eps = static_cast<A>(numbers.eps), l2 = static_cast<A>(numbers.l2);
  const auto decay = static_cast<A>(numbers.decay);
  const auto step_size = static_cast<A>(numbers.step_size);
  const auto correction = static_cast<A>(numbers.second_correction);
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) {
    const A value = widen<A>(param[i]);
    A slope = widen<A>(grad[i]);
    if constexpr (kL2) slope += l2 * value;
    const A first = beta1 * exp_avg[i] + rest1 * slope;
    const A second = beta2 * exp_avg_sq[i] + rest2 * slope * slope;
    exp_avg[i] = first;
    exp_avg_sq[i] = second;
    const A change = step_size * first / (std::sqrt(second) * correction + eps);
    param[i] = narrow<P>(decay * value - change);
  }
}

template <bool kL2, class P, class G>
TESSERA_INLINE void step_all(const AdamNumbers& numbers, void* param, const void* grad,
                             void* exp_avg, void* exp_avg_sq, int64_t numel) {
  auto* const p = static_cast<P*>(param);
  const auto* const g = static_cast<const G*>(grad);
  auto* const m = static_cast<Moment<P>*>(exp_avg);
  auto* const v = static_cast<Moment<P>*>(exp_avg_sq);
  int64_t i = 0;
  for (; i + kBlock <= numel; i += kBlock)
    step_block<kL2>(numbers, p + i, g + i, m + i, v + i, kBlock);
  if (i < numel) step_block<kL2>(numbers, p + i, g + i, m + i, v + i, numel - i);
}

template <bool kL2, class P, class G>
TESSERA_TARGET_AVX2 void step_avx2(const AdamNumbers& numbers, void* param, const void* grad,
                                   void* exp_avg, void* exp_avg_sq, int64_t numel) {
  step_all<kL2, P, G>(numbers, param, grad, exp_avg, exp_avg_sq, numel);
}
template <bool kL2, class P, class G>
void step_portable(const AdamNumbers& numbers, void* param, const void* grad, void* exp_avg,
                   void* exp_avg_sq, int64_t numel) {
  step_all<kL2, P, G>(numbers, param, grad, exp_avg, exp_avg_sq, numel);
}

template <class P, class G>
void step(const AdamNumbers& numbers, void* param, const void* grad, void* exp_avg,
          void* exp_avg_sq, int64_t numel) {
  static const bool has_avx2 = TESSERA_HAS_AVX2;
  const AdamLoop with_l2 = has_avx2 ? &step_avx2<true, P, G> : &step_portable<true, P, G>;
  const AdamLoop without = has_avx2 ? &step_avx2<false, P, G> : &step_portable<false, P, G>;
  (numbers.l2 != 0 ? with_l2 : without)(numbers, param, grad, exp_avg, exp_avg_sq, numel);
}

template <class P>
AdamLoop loop_for(at::ScalarType param, at::ScalarType grad) {
  if (grad == param) return &step<P, P>;
  if (grad == at::kFloat) return &step<P, float>;
  return nullptr;
}

}  // namespace

AdamLoop adam_loop(at::ScalarType param, at::ScalarType grad) {
  switch (param) {
    case at::kFloat:
      return loop_for<float>(param, grad);
    case at::kDouble:
      return loop_for<double>(param, grad);
    case at::kBFloat16:
      return loop_for<c10::BFloat16>(param, grad);
    case at::kHalf:
      return loop_for<c10::Half>(param, grad);
    default:
      return nullptr;
  }
}

}  // namespace tessera
