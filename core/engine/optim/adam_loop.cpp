#include "engine/optim/adam_loop.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/memory/avx2.h"

// [Note: Bits of a step]
//
// Vectors and the single elements at the end of a tensor must get the same bits: then the places
// where ranks and threads cut do not matter. IEEE sums, products, quotients and square roots are
// correctly rounded in both; results would differ only if the compiler fused a product with a sum
// in one and not in the other. So this file is compiled with -ffp-contract=off (CMakeLists.txt).
// The step is bound by memory, so this does not slow it down.
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

// c10's conversions of Half have branches. These compute the same numbers without branches, so that
// they can be vectorized.
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
  // Adding 0.5 rounds to multiples of the smallest Half.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - half;
  const uint32_t special = magnitude > kInfinity ? 0x7e00 : 0x7c00;
  uint32_t result = magnitude < 113U << 23 ? subnormal : normal;
  result = magnitude >= 143U << 23 ? special : result;
  return c10::Half(static_cast<uint16_t>(result | (bits >> 16 & 0x8000)), c10::Half::from_bits());
}

// The tensors of a loop. `R`: dtype of the rounded copy of the parameters, or void.
template <class P, class G, class R>
struct Streams {
  P* param;
  const G* grad;
  Moment<P>*exp_avg, *exp_avg_sq;
  R* rounded;
};

template <bool kL2, class P, class G, class R>
TESSERA_INLINE void step_block(const AdamNumbers& numbers, const Streams<P, G, R>& streams,
                               int64_t begin, int64_t numel) {
  using A = Moment<P>;
  const auto beta1 = static_cast<A>(numbers.beta1), rest1 = static_cast<A>(1 - numbers.beta1);
  const auto beta2 = static_cast<A>(numbers.beta2), rest2 = static_cast<A>(1 - numbers.beta2);
  const auto eps = static_cast<A>(numbers.eps), l2 = static_cast<A>(numbers.l2);
  const auto decay = static_cast<A>(numbers.decay);
  const auto step_size = static_cast<A>(numbers.step_size);
  const auto correction = static_cast<A>(numbers.second_correction);
  P* const __restrict param = streams.param + begin;
  const G* const __restrict grad = streams.grad + begin;
  A* const __restrict exp_avg = streams.exp_avg + begin;
  A* const __restrict exp_avg_sq = streams.exp_avg_sq + begin;
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
    const A next = decay * value - change;
    param[i] = narrow<P>(next);
    if constexpr (!std::is_void_v<R>) streams.rounded[begin + i] = narrow<R>(next);
  }
}

template <bool kL2, class P, class G, class R>
TESSERA_INLINE void step_all(const AdamNumbers& numbers, const AdamPointers& pointers,
                             int64_t numel) {
  const Streams<P, G, R> streams{
      static_cast<P*>(pointers.param), static_cast<const G*>(pointers.grad),
      static_cast<Moment<P>*>(pointers.exp_avg), static_cast<Moment<P>*>(pointers.exp_avg_sq),
      static_cast<R*>(pointers.rounded)};
  int64_t i = 0;
  for (; i + kBlock <= numel; i += kBlock) step_block<kL2>(numbers, streams, i, kBlock);
  if (i < numel) step_block<kL2>(numbers, streams, i, numel - i);
}

template <bool kL2, class P, class G, class R>
TESSERA_TARGET_AVX2 void step_avx2(const AdamNumbers& numbers, const AdamPointers& pointers,
                                   int64_t numel) {
  step_all<kL2, P, G, R>(numbers, pointers, numel);
}
template <bool kL2, class P, class G, class R>
void step_portable(const AdamNumbers& numbers, const AdamPointers& pointers, int64_t numel) {
  step_all<kL2, P, G, R>(numbers, pointers, numel);
}

template <class P, class G, class R = void>
void step(const AdamNumbers& numbers, const AdamPointers& pointers, int64_t numel) {
  static const bool has_avx2 = TESSERA_HAS_AVX2;
  const AdamLoop with_l2 = has_avx2 ? &step_avx2<true, P, G, R> : &step_portable<true, P, G, R>;
  const AdamLoop without = has_avx2 ? &step_avx2<false, P, G, R> : &step_portable<false, P, G, R>;
  (numbers.l2 != 0 ? with_l2 : without)(numbers, pointers, numel);
}

template <class P>
AdamLoop loop_for(at::ScalarType param, at::ScalarType grad) {
  if (grad == param) return &step<P, P>;
  if (grad == at::kFloat) return &step<P, float>;
  return nullptr;
}

AdamLoop float_loop(at::ScalarType grad) {
  if (grad == at::kFloat) return &step<float, float>;
  if (grad == at::kBFloat16) return &step<float, c10::BFloat16>;
  if (grad == at::kHalf) return &step<float, c10::Half>;
  return nullptr;
}

AdamLoop rounding_loop(at::ScalarType rounded) {
  if (rounded == at::kBFloat16) return &step<float, float, c10::BFloat16>;
  if (rounded == at::kHalf) return &step<float, float, c10::Half>;
  return nullptr;
}

}  // namespace

AdamLoop adam_loop(at::ScalarType param, at::ScalarType grad, at::ScalarType rounded) {
  if (rounded != at::ScalarType::Undefined)
    return param == at::kFloat && grad == at::kFloat ? rounding_loop(rounded) : nullptr;
  switch (param) {
    case at::kFloat:
      return float_loop(grad);
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
