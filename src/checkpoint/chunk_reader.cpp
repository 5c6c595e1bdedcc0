#include "checkpoint/chunk_reader.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "checkpoint/chunks.h"
#include "checkpoint/directory.h"

namespace tessera {
namespace {

// A checkpoint of many ranks has more files than a process may open.
constexpr size_t kMostOpen = 64;

CheckpointIndex read_index(const File& directory) {
  const File file = directory.open(kIndexFile);
  std::string text(static_cast<size_t>(file.nbytes()), '\0');
  file.read(text.data(), text.size(), 0);
  CheckpointIndex index = index_from_json(text);
  check_whole(index);
  return index;
}

// Calls `f` with each chunk that has some of elements [begin, end), and with that range.
template <class F>
void for_each_chunk(const TensorRecord& tensor, int64_t begin, int64_t end, F&& f) {
  for (const ChunkRecord& chunk : tensor.chunks) {
    const int64_t from = std::max(begin, chunk.begin), to = std::min(end, chunk.end);
    if (from < to) f(chunk, from, to);
  }
}

}  // namespace

ChunkReader::ChunkReader(const std::filesystem::path& path)
    : directory_(File::open_directory(readable_checkpoint(path))), index_(read_index(directory_)) {}

SafetensorsFile& ChunkReader::file(const std::string& name) {
  auto it = open_.find(name);
  if (it == open_.end()) {
    if (open_.size() >= kMostOpen) open_.clear();
    it = open_.emplace(name, SafetensorsFile(directory_.open(name))).first;
    const auto& metadata = it->second.metadata();
    const auto id = metadata.find("id");
    TORCH_CHECK_VALUE(id != metadata.end() && id->second == index_.id, "[load_checkpoint] '",
                      directory_.path(), "/", name,
                      "' is of another save than the index; expected id ", index_.id, ", got ",
                      id == metadata.end() ? "none" : id->second);
  }
  return it->second;
}

void ChunkReader::check(const TensorRecord& tensor, int64_t begin, int64_t end) {
  for_each_chunk(tensor, begin, end, [&](const ChunkRecord& chunk, int64_t, int64_t) {
    file(chunk.file).check(chunk.key, tensor.dtype, chunk.end - chunk.begin);
  });
}

void ChunkReader::read_stored(const TensorRecord& tensor, int64_t begin, int64_t end, void* out) {
  const auto item = static_cast<int64_t>(c10::elementSize(scalar_type_of(tensor.dtype)));
  for_each_chunk(tensor, begin, end, [&](const ChunkRecord& chunk, int64_t from, int64_t to) {
    file(chunk.file)
        .read(chunk.key, from - chunk.begin, to - chunk.begin,
              static_cast<char*>(out) + (from - begin) * item);
  });
}

at::Tensor ChunkReader::read_reordered(const TensorRecord& tensor, at::IntArrayRef strides) {
  const int64_t numel = tensor.numel();
  const auto dtype = scalar_type_of(tensor.dtype);
  const at::Tensor stored = at::empty({numel}, dtype);
  read_stored(tensor, 0, numel, stored.mutable_data_ptr());
  at::Tensor ordered = at::empty_strided(tensor.shape, strides, dtype);
  ordered.copy_(at::as_strided(stored, tensor.shape, tensor.strides));
  return at::as_strided(ordered, {numel}, {1});
}

void ChunkReader::read(const TensorRecord& tensor, at::IntArrayRef strides, int64_t begin,
                       int64_t end, const at::Tensor& out) {
  if (!is_same_order(tensor.shape, strides, tensor.strides)) {
    out.copy_(read_reordered(tensor, strides).narrow(0, begin, end - begin).view(out.sizes()));
  } else if (out.is_cpu() && out.is_contiguous()) {
    read_stored(tensor, begin, end, out.mutable_data_ptr());
  } else {
    const at::Tensor staged = at::empty(out.sizes(), scalar_type_of(tensor.dtype));
    read_stored(tensor, begin, end, staged.mutable_data_ptr());
    out.copy_(staged);
  }
}

}  // namespace tessera
