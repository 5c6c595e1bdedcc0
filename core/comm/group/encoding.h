#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/collective.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace tessera {

/// Returns "plain", "bfloat16", "half", "int8" or "float8".
const char* to_string(Encoding encoding);

/// Returns true if elements have a scale in common with their neighbours: what becomes of one
/// depends on where its block begins.
bool has_blocks(Encoding encoding);

/// Returns the encoding in blocks that a dtype of 8 bits stands for in a plan; none for others.
std::optional<Encoding> block_encoding(at::ScalarType dtype);

/// Returns the encoding that rounds to `dtype`, `kPlain` if there is none.
Encoding rounding_encoding(at::ScalarType dtype);

/// Elements of a block. Values can be encoded in parts that begin at multiples of it, with the same
/// result.
inline constexpr int64_t kEncodedBlock = 256;

/// Throws `c10::NotImplementedError` if elements of `dtype` can't be encoded: all but float,
/// bfloat16 and half.
void check_encodable(const char* function, Encoding encoding, at::ScalarType dtype);

/// Returns the bytes of `numel` encoded elements of `dtype`.
int64_t encoded_nbytes(Encoding encoding, int64_t numel, at::ScalarType dtype);

/// Encodes `numel` elements of `dtype`. With `error` (`numel` floats), encodes their sums with it,
/// and leaves there what the encoding has lost of each; 0 where a block is not finite.
///
/// Calls no LibTorch operator, as `decode()`, so it may run concurrently with autograd.
void encode(Encoding encoding, at::ScalarType dtype, const void* values, int64_t numel,
            std::byte* out, float* error = nullptr);

/// Decodes `numel` elements into elements of `dtype`.
void decode(Encoding encoding, const std::byte* encoded, int64_t numel, at::ScalarType dtype,
            void* values);

/// Converts `numel` elements of `dtype` to float.
void widen(at::ScalarType dtype, const void* values, int64_t numel, float* out);

/// Returns the values that `values` (1-D, on the host) have once they are encoded and decoded: a
/// new tensor. Encoding those changes nothing, except for blocks of half. `error`: as for
/// `encode()`, or undefined.
at::Tensor rounded_by(Encoding encoding, const at::Tensor& values, const at::Tensor& error = {});

}  // namespace tessera
