#include "checkpoint/host_copy.h"

#include <ATen/ops/from_blob.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstring>
#include <new>

namespace tessera {
namespace {

constexpr size_t kAlignment = HostCopy::kAlignment;

size_t room_for(const ChunkData& chunk) {
  return (static_cast<size_t>(chunk.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

// Bytes to prefetch ahead of the copy.
[[maybe_unused]] constexpr size_t kAhead = 1024;

// Writes past the caches: the copy is not read soon, and its memory need not be read before it is
// overwritten. (memcpy does so only for pieces that are larger than most shards.) `to` is aligned.
void copy_past_caches(char* to, const char* from, size_t nbytes) {
  size_t done = 0;
#ifdef __SSE2__
  for (; done + kAlignment <= nbytes; done += kAlignment) {
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    _mm_prefetch(from + done + kAhead, _MM_HINT_NTA);
    auto* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1),
                  c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();
#endif
  std::memcpy(to + done, from + done, nbytes - done);
}

}  // namespace

void HostCopy::take(RankContents& contents) {
  size_t nbytes = 0;
  for (const ChunkData& chunk : contents.chunks) nbytes += room_for(chunk);
  if (nbytes > nbytes_) {
    memory_.reset();  // before more is allocated
    memory_.reset(new (std::align_val_t(kAlignment)) char[nbytes]);
    nbytes_ = nbytes;
  }
  char* next = memory_.get();
  for (ChunkData& chunk : contents.chunks) {
    const at::Tensor data = chunk.get();
    const at::Tensor copy = at::from_blob(next, {chunk.numel}, at::dtype(chunk.dtype));
    if (data.is_cpu() && data.is_contiguous()) {
      copy_past_caches(next, static_cast<const char*>(data.const_data_ptr()), data.nbytes());
    } else {
      copy.copy_(data);
    }
    next += room_for(chunk);
    chunk = chunk_of(chunk.key, copy);
  }
}

}  // namespace tessera
