#include "engine/optim/small_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "base/memory/dense_strides.h"

namespace tessera {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;  // bits of the float

// Code c is for values from borders[c - 1] to borders[c].
struct Table {
  Code code{0, 1}, borders{};

  explicit Table(bool is_signed) {
    constexpr double kDecades[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
    size_t count = 2;
    for (int i = 0; i < 7; ++i) {
      const int intervals = is_signed ? 1 << i : 2 << i;
      for (int k = 0; k < intervals; ++k) {
        const auto middle = static_cast<float>(kDecades[i] * (0.1 + 0.9 * (k + 0.5) / intervals));
        code[count++] = middle;
        if (is_signed) code[count++] = -middle;
      }
    }
    std::sort(code.begin(), code.end());
    for (size_t c = 0; c < 255; ++c) borders[c] = code[c] + (code[c + 1] - code[c]) / 2;
    borders[255] = std::numeric_limits<float>::infinity();
  }
};

const Table& table(bool is_signed) {
  static const Table with_signs(true), without(false);
  return is_signed ? with_signs : without;
}

// Spreads each bit over the others.
inline uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352d;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

}  // namespace

const Code& dynamic_code(bool is_signed) { return table(is_signed).code; }

float encode_block(const float* values, bool is_signed, int64_t numel, uint8_t* codes) {
  uint32_t largest = 0;  // bits of magnitudes are ordered like them, and NaN comes last
  for (int64_t i = 0; i < numel; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffff);
  const float scale = largest >= kInfinity ? std::numeric_limits<float>::quiet_NaN()
                                           : std::bit_cast<float>(largest);
  const float divisor = largest == 0 ? 1 : scale;
  const Code& borders = table(is_signed).borders;
  // Bisects for all values at a time: no step waits for the one before, and none is a branch.
  std::array<float, kStateBlock> scaled;
  std::array<uint32_t, kStateBlock> found{};
  for (int64_t i = 0; i < numel; ++i) scaled[i] = values[i] / divisor;
  for (uint32_t half = 128; half > 0; half /= 2) {
    for (int64_t i = 0; i < numel; ++i)
      found[i] += half * static_cast<uint32_t>(scaled[i] >= borders[found[i] + half - 1]);
  }
  for (int64_t i = 0; i < numel; ++i) codes[i] = static_cast<uint8_t>(found[i]);
  return scale;
}

void decode_block(const uint8_t* codes, float scale, bool is_signed, int64_t numel, float* values) {
  const Code& code = dynamic_code(is_signed);
  for (int64_t i = 0; i < numel; ++i) values[i] = code[codes[i]] * scale;
}

uint32_t noise_start(int64_t seed, int64_t step, bool is_second) {
  uint64_t x = static_cast<uint64_t>(seed) +
               0x9e3779b97f4a7c15 * (2 * static_cast<uint64_t>(step) + (is_second ? 1 : 0));
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return static_cast<uint32_t>(x >> 32);
}

void round_with_noise(const float* values, const float* grads, uint32_t start, int64_t numel,
                      uint16_t* rounded) {
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t noise = mixed(mixed(bits + start) ^ std::bit_cast<uint32_t>(grads[i])) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > kInfinity;
    rounded[i] = static_cast<uint16_t>((is_nan ? bits | 0x400000 : bits + noise) >> 16);
  }
}

KeptMoment converted(const KeptMoment& kept, bool is_signed, at::ScalarType dtype,
                     const at::Tensor& like) {
  const int64_t numel = like.numel();
  at::Tensor values = kept.values;
  if (values.scalar_type() == at::kByte) {
    TORCH_CHECK_VALUE(values.sizes() == like.sizes() && kept.scales.defined() &&
                          kept.scales.scalar_type() == at::kFloat &&
                          kept.scales.numel() == blocks_of(numel),
                      "[CPUAdam] 8-bit state must have its parameter's shape, ", like.sizes(),
                      ", and a Float scale for each block of ", kStateBlock, " elements");
    if (dtype == at::kByte && values.strides() == at::IntArrayRef(dense_strides(like))) return kept;
    const at::Tensor scales = kept.scales.cpu().contiguous();
    const at::Tensor codes =
        values.is_non_overlapping_and_dense() ? values.cpu() : values.cpu().contiguous();
    values = at::empty_strided(codes.sizes(), codes.strides(), at::kFloat);
    for (int64_t i = 0; i < numel; i += kStateBlock)
      decode_block(codes.const_data_ptr<uint8_t>() + i,
                   scales.const_data_ptr<float>()[i / kStateBlock], is_signed,
                   std::min(kStateBlock, numel - i), values.mutable_data_ptr<float>() + i);
  }
  if (dtype != at::kByte) return {values.to(dtype), {}};
  const std::vector<int64_t> strides = dense_strides(like);
  const at::Tensor wide = at::empty_strided(like.sizes(), strides, at::kFloat).copy_(values);
  KeptMoment coded{at::empty_strided(like.sizes(), strides, at::kByte),
                   at::empty({blocks_of(numel)}, at::kFloat)};
  for (int64_t i = 0; i < numel; i += kStateBlock)
    coded.scales.mutable_data_ptr<float>()[i / kStateBlock] =
        encode_block(wide.const_data_ptr<float>() + i, is_signed, std::min(kStateBlock, numel - i),
                     coded.values.mutable_data_ptr<uint8_t>() + i);
  return coded;
}

}  // namespace tessera
