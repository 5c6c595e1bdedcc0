#include "checkpoint/host_copy.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

namespace tessera {
namespace {

constexpr size_t kAlignment = 64;

size_t room_for(const ChunkData& chunk) {
  return (static_cast<size_t>(chunk.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

void HostCopy::take(RankContents& contents) {
  size_t nbytes = 0;
  for (const ChunkData& chunk : contents.chunks) nbytes += room_for(chunk);
  if (nbytes > nbytes_) {
    memory_.reset();  // before there is more
    memory_.reset(new char[nbytes]);
    nbytes_ = nbytes;
  }
  char* next = memory_.get();
  for (ChunkData& chunk : contents.chunks) {
    const at::Tensor data = chunk.get();
    const at::Tensor copy = at::from_blob(next, {chunk.numel}, at::dtype(chunk.dtype));
    if (data.is_cpu() && data.is_contiguous()) {
      std::memcpy(next, data.const_data_ptr(), data.nbytes());
    } else {
      copy.copy_(data);
    }
    next += room_for(chunk);
    chunk = chunk_of(chunk.key, copy);
  }
}

}  // namespace tessera
