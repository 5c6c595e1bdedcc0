#include "comm/group/encoding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/memory/avx2.h"

namespace tessera {

// [Note: Blocks]
//
// A block of 256 elements is a float scale and a byte for each element, so float takes 260 bytes
// for 1024. Ranks gather values that their owner has rounded by this encoding already, and encode
// them again to send them, possibly in parts; so encoding must not change rounded values:
//
// - int8 for float: the scale is the largest magnitude / 127, with its mantissa rounded up to 16
//   bits. The product with an int8 is then exact in float, the largest element becomes 127 or -127,
//   and the largest rounded element gives the same scale again.
// - int8 for bfloat16, too short for such products: the scale is the least power of two with which
//   the largest magnitude is at most 127.
// - float8 (e4m3): the same with 448, the largest value of the format. If the rounded values fit a
//   smaller power, too, that one gives the same values.
//
// A block with an infinity or NaN becomes NaN altogether: a sum over ranks must show that a
// gradient overflowed. Magnitudes below 1e-30 become zeros, so that no scale is denormal.
namespace {

constexpr int64_t kScaleBytes = sizeof(float);
constexpr uint32_t kInfinity = 0x7F800000;
constexpr float kLeast = 1e-30f;
constexpr float kMaxInt8 = 127;
constexpr float kMaxFloat8 = 448;

// Added to a value, this rounds it to the nearest integer, and leaves that in the low bits.
constexpr float kRounding = 12582912;  // 1.5 * 2^23

using Floats = std::array<float, kEncodedBlock>;

template <class T>
TESSERA_INLINE void load(const T* values, int64_t numel, float* out) {
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) out[i] = static_cast<float>(values[i]);
}

template <class T>
TESSERA_INLINE void store(const float* values, int64_t numel, T* out) {
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) out[i] = static_cast<T>(values[i]);
}

// Returns the bits of the largest magnitude; those of infinities and NaN are the largest.
TESSERA_INLINE uint32_t largest_bits(const float* values, int64_t numel) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFFu);
  return largest;
}

// Returns the least power of two that is at least `value`. Requires `value > 0`.
TESSERA_INLINE float power_of_two_from(float value) {
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

// The scale of a block of elements of type T whose largest magnitude is finite.
template <class T>
TESSERA_INLINE float scale_of(Encoding encoding, float largest) {
  if (largest < kLeast) return 0;
  if (encoding == Encoding::kFloat8) return power_of_two_from(largest / kMaxFloat8);
  if (std::is_same_v<T, c10::BFloat16>) return power_of_two_from(largest / kMaxInt8);
  constexpr uint32_t kDropped = 0x7F;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(largest / kMaxInt8) + kDropped) & ~kDropped);
}

TESSERA_INLINE void int8_codes(const float* values, int64_t numel, float inverse, int8_t* codes) {
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) {
    const auto bits = std::bit_cast<int32_t>(values[i] * inverse + kRounding);
    codes[i] = static_cast<int8_t>(bits);
  }
}

TESSERA_INLINE void int8_values(const int8_t* codes, int64_t numel, float scale, float* values) {
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>(codes[i]) * scale;
}

// The value of each code.
const std::array<float, 256>& float8_table() {
  static const auto table = [] {
    std::array<float, 256> values{};
    for (size_t code = 0; code < values.size(); ++code)
      values[code] = static_cast<float>(
          c10::Float8_e4m3fn(static_cast<uint8_t>(code), c10::Float8_e4m3fn::from_bits()));
    return values;
  }();
  return table;
}

TESSERA_INLINE void decode_block(Encoding encoding, const std::byte* in, int64_t numel,
                                 float* values) {
  float scale = 0;
  std::memcpy(&scale, in, sizeof(scale));
  const std::byte* const codes = in + kScaleBytes;
  if (encoding == Encoding::kInt8) {
    int8_values(reinterpret_cast<const int8_t*>(codes), numel, scale, values);
    return;
  }
  const auto& table = float8_table();
  for (int64_t i = 0; i < numel; ++i) values[i] = table[static_cast<uint8_t>(codes[i])] * scale;
}

template <class T>
TESSERA_INLINE void encode_block(Encoding encoding, const float* values, int64_t numel,
                                 std::byte* out) {
  const uint32_t bits = largest_bits(values, numel);
  std::byte* const codes = out + kScaleBytes;
  if (bits >= kInfinity) {
    const float scale = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(out, &scale, sizeof(scale));
    std::memset(codes, 1, numel);
    return;
  }
  const auto largest = std::bit_cast<float>(bits);
  const bool is_int8 = encoding == Encoding::kInt8;
  const float scale = scale_of<T>(encoding, largest);
  std::memcpy(out, &scale, sizeof(scale));
  if (scale == 0) {
    std::memset(codes, 0, numel);
  } else if (is_int8) {
    int8_codes(values, numel, 1 / scale, reinterpret_cast<int8_t*>(codes));
  } else {
    const float inverse = 1 / scale;
    for (int64_t i = 0; i < numel; ++i)
      codes[i] = static_cast<std::byte>(c10::Float8_e4m3fn(values[i] * inverse).x);
  }
}

template <class T>
TESSERA_INLINE void encode_blocks(Encoding encoding, const T* values, int64_t numel, std::byte* out,
                                  float* error) {
  Floats block, decoded;
  for (int64_t begin = 0; begin < numel; begin += kEncodedBlock) {
    const int64_t count = std::min(kEncodedBlock, numel - begin);
    load(values + begin, count, block.data());
    if (error) {
      for (int64_t i = 0; i < count; ++i) block[i] += error[begin + i];
    }
    encode_block<T>(encoding, block.data(), count, out);
    if (error) {
      decode_block(encoding, out, count, decoded.data());
      for (int64_t i = 0; i < count; ++i) {
        const float lost = block[i] - decoded[i];
        error[begin + i] = std::isfinite(lost) ? lost : 0;
      }
    }
    out += kScaleBytes + count;
  }
}

template <class T>
TESSERA_INLINE void decode_blocks(Encoding encoding, const std::byte* in, int64_t numel,
                                  T* values) {
  Floats block;
  for (int64_t begin = 0; begin < numel; begin += kEncodedBlock) {
    const int64_t count = std::min(kEncodedBlock, numel - begin);
    decode_block(encoding, in, count, block.data());
    store(block.data(), count, values + begin);
    in += kScaleBytes + count;
  }
}

template <class T>
TESSERA_TARGET_AVX2 void encode_avx2(Encoding encoding, const T* values, int64_t numel,
                                     std::byte* out, float* error) {
  encode_blocks(encoding, values, numel, out, error);
}
template <class T>
TESSERA_TARGET_AVX2 void decode_avx2(Encoding encoding, const std::byte* in, int64_t numel,
                                     T* values) {
  decode_blocks(encoding, in, numel, values);
}

// Elements of a narrower dtype, without blocks.
template <class Code, class T>
void encode_each(const T* values, int64_t numel, std::byte* out, float* error) {
  auto* const codes = reinterpret_cast<Code*>(out);
  for (int64_t i = 0; i < numel; ++i) {
    const float value = static_cast<float>(values[i]) + (error ? error[i] : 0);
    codes[i] = static_cast<Code>(value);
    if (!error) continue;
    const float lost = value - static_cast<float>(codes[i]);
    error[i] = std::isfinite(lost) ? lost : 0;
  }
}

template <class Code, class T>
void decode_each(const std::byte* in, int64_t numel, T* values) {
  const auto* const codes = reinterpret_cast<const Code*>(in);
  for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<T>(static_cast<float>(codes[i]));
}

template <class T>
void encode_as(Encoding encoding, const void* from, int64_t numel, std::byte* out, float* error) {
  static const bool has_avx2 = TESSERA_HAS_AVX2;
  const auto* const values = static_cast<const T*>(from);
  if (encoding == Encoding::kBFloat16) {
    encode_each<c10::BFloat16>(values, numel, out, error);
  } else if (encoding == Encoding::kHalf) {
    encode_each<c10::Half>(values, numel, out, error);
  } else {
    (has_avx2 ? encode_avx2<T> : encode_blocks<T>)(encoding, values, numel, out, error);
  }
}

template <class T>
void decode_as(Encoding encoding, const std::byte* in, int64_t numel, void* to) {
  static const bool has_avx2 = TESSERA_HAS_AVX2;
  auto* const values = static_cast<T*>(to);
  if (encoding == Encoding::kBFloat16) {
    decode_each<c10::BFloat16>(in, numel, values);
  } else if (encoding == Encoding::kHalf) {
    decode_each<c10::Half>(in, numel, values);
  } else {
    (has_avx2 ? decode_avx2<T> : decode_blocks<T>)(encoding, in, numel, values);
  }
}

bool is_encodable(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Calls `f` with a value of the type of `dtype`.
template <class F>
void with_type(at::ScalarType dtype, F&& f) {
  TORCH_INTERNAL_ASSERT(is_encodable(dtype));
  if (dtype == at::kFloat) {
    f(float());
  } else if (dtype == at::kBFloat16) {
    f(c10::BFloat16());
  } else {
    f(c10::Half());
  }
}

}  // namespace

const char* to_string(Encoding encoding) {
  constexpr const char* kNames[] = {"plain", "bfloat16", "half", "int8", "float8"};
  return kNames[static_cast<size_t>(encoding)];
}

bool has_blocks(Encoding encoding) {
  return encoding == Encoding::kInt8 || encoding == Encoding::kFloat8;
}

std::optional<Encoding> block_encoding(at::ScalarType dtype) {
  if (dtype == at::kChar) return Encoding::kInt8;
  if (dtype == at::kFloat8_e4m3fn) return Encoding::kFloat8;
  return std::nullopt;
}

Encoding rounding_encoding(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return Encoding::kBFloat16;
  return dtype == at::kHalf ? Encoding::kHalf : Encoding::kPlain;
}

void check_encodable(const char* function, Encoding encoding, at::ScalarType dtype) {
  TORCH_CHECK_NOT_IMPLEMENTED(encoding == Encoding::kPlain || is_encodable(dtype), "[", function,
                              "] only elements of float, bfloat16 and half can be sent as ",
                              to_string(encoding), "; got ", dtype);
}

int64_t encoded_nbytes(Encoding encoding, int64_t numel, at::ScalarType dtype) {
  if (encoding == Encoding::kPlain) return numel * static_cast<int64_t>(c10::elementSize(dtype));
  if (!has_blocks(encoding)) return 2 * numel;
  return numel + (numel + kEncodedBlock - 1) / kEncodedBlock * kScaleBytes;
}

void encode(Encoding encoding, at::ScalarType dtype, const void* values, int64_t numel,
            std::byte* out, float* error) {
  with_type(dtype,
            [&](auto type) { encode_as<decltype(type)>(encoding, values, numel, out, error); });
}

void decode(Encoding encoding, const std::byte* encoded, int64_t numel, at::ScalarType dtype,
            void* values) {
  with_type(dtype, [&](auto type) { decode_as<decltype(type)>(encoding, encoded, numel, values); });
}

void widen(at::ScalarType dtype, const void* values, int64_t numel, float* out) {
  with_type(dtype,
            [&](auto type) { load(static_cast<const decltype(type)*>(values), numel, out); });
}

at::Tensor rounded_by(Encoding encoding, const at::Tensor& values, const at::Tensor& error) {
  const at::ScalarType dtype = values.scalar_type();
  const at::Tensor result = at::empty_like(values);
  if (values.is_meta()) return result;
  // Encodes a few blocks at a time, so that they stay in the cache.
  constexpr int64_t kPart = 64 * kEncodedBlock;
  std::vector<std::byte> encoded(encoded_nbytes(encoding, kPart, dtype));
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  const auto* const from = static_cast<const std::byte*>(values.const_data_ptr());
  auto* const to = static_cast<std::byte*>(result.mutable_data_ptr());
  auto* const lost = error.defined() ? error.mutable_data_ptr<float>() : nullptr;
  for (int64_t begin = 0; begin < values.numel(); begin += kPart) {
    const int64_t numel = std::min(kPart, values.numel() - begin);
    encode(encoding, dtype, from + begin * item, numel, encoded.data(),
           lost ? lost + begin : nullptr);
    decode(encoding, encoded.data(), numel, dtype, to + begin * item);
  }
  return result;
}

}  // namespace tessera
