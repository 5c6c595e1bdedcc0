#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace tessera {

/// Elements of 8-bit state that share a scale.
constexpr int64_t kStateBlock = 256;
inline int64_t blocks_of(int64_t numel) { return (numel + kStateBlock - 1) / kStateBlock; }

using Code = std::array<float, 256>;
/// Returns the values of the dynamic code, ascending: 0, 1, and in each of seven decades, of which
/// the top one is from 0.1 to 1, the middles of 2^i equal intervals: 64 in the top one, half as
/// many in each below. Signed: these and the negatives of the middles; else twice the intervals.
const Code& dynamic_code(bool is_signed);

/// Encodes the values of a block; see `CPUAdamOptions`. Takes the higher of two equally near ones.
/// Returns the scale: the largest magnitude, or NaN if a value is not finite.
float encode_block(const float* values, bool is_signed, int64_t numel, uint8_t* codes);
void decode_block(const uint8_t* codes, float scale, bool is_signed, int64_t numel, float* values);

/// Returns where the noise of a moment begins at a step.
uint32_t noise_start(int64_t seed, int64_t step, bool is_second);
/// Rounds to BFloat16, stochastically: the noise is a hash of `start`, the value and its gradient.
void round_with_noise(const float* values, const float* grads, uint32_t start, int64_t numel,
                      uint16_t* rounded);

/// A moment as it is kept: by itself, or as codes with the scales of their blocks.
struct KeptMoment {
  at::Tensor values, scales;
};
/// Converts to `dtype` for a parameter that lies in memory like `like`: Byte encodes, others round
/// to nearest. Returns `kept` if there is nothing to do.
KeptMoment converted(const KeptMoment& kept, bool is_signed, at::ScalarType dtype,
                     const at::Tensor& like);

}  // namespace tessera
