#include "checkpoint/chunk_reader.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/dispatch/math_bits.h"
#include "base/files/file.h"
#include "base/files/untrusted.h"
#include "checkpoint/checksum.h"
#include "checkpoint/directory.h"
#include "checkpoint/safetensors.h"

namespace tessera {
namespace {

// Most files to keep open: a checkpoint of many ranks has more than a process may open.
constexpr size_t kMostOpen = 64;

/// Reads bytes of one chunk in ascending order, by blocks that have checksums.
class CheckedBytes {
 public:
  CheckedBytes(const ChunkSource& file, const ChunkRecord& chunk, int64_t nbytes,
               std::vector<char>& block)
      : file_(file), chunk_(chunk), nbytes_(nbytes), block_(block) {}

  void read(int64_t offset, int64_t count, char* out) {
    if (chunk_.checksums.empty())  // another tool's file
      return file_.read(chunk_.key, offset, static_cast<size_t>(count), out);
    while (count > 0) {
      const int64_t index = offset / kChecksumBlock, begin = index * kChecksumBlock;
      const int64_t size = std::min(kChecksumBlock, nbytes_ - begin);
      const int64_t taken = std::min(count, begin + size - offset);
      if (taken == size) {
        fetch(index, size, out);
      } else {
        if (index != held_) {
          block_.resize(static_cast<size_t>(kChecksumBlock));
          held_ = -1;
          fetch(index, size, block_.data());
          held_ = index;
        }
        std::memcpy(out, block_.data() + (offset - begin), static_cast<size_t>(taken));
      }
      offset += taken;
      out += taken;
      count -= taken;
    }
  }

 private:
  void fetch(int64_t index, int64_t size, char* out) {
    const int64_t begin = index * kChecksumBlock;
    file_.read(chunk_.key, begin, static_cast<size_t>(size), out);
    TORCH_CHECK_VALUE(checksum(out, static_cast<size_t>(size)) == chunk_.checksums[index],
                      "[checkpoint] '", file_.path(), "' is damaged: bytes ", begin, " to ",
                      begin + size - 1, " of '", shortened(chunk_.key),
                      "' don't have the checksum that the index has for them");
  }

  const ChunkSource& file_;
  const ChunkRecord& chunk_;
  int64_t nbytes_;
  std::vector<char>& block_;  // holds block number `held_`
  int64_t held_ = -1;
};

std::shared_ptr<const ChunkSource> open_rank_file(const File& directory, const std::string& name,
                                                  const std::string& id) {
  auto file = std::make_shared<const SafetensorsFile>(directory.open(name));
  const auto found = file->metadata().find("id");
  TORCH_CHECK_VALUE(found != file->metadata().end() && found->second == id, "[checkpoint] '",
                    file->path(), "' is of another save than the index; expected id ", id, ", got ",
                    found == file->metadata().end() ? "none" : found->second);
  return file;
}

// Returns the strides by which a region's elements are counted: row by row in a box.
std::vector<int64_t> order_of(const TensorRecord& tensor, at::IntArrayRef strides,
                              const Region& region) {
  return region.box ? row_major(tensor.shape) : strides.vec();
}

}  // namespace

ChunkReader::ChunkReader(const std::filesystem::path& path) {
  const auto directory =
      std::make_shared<const File>(File::open_directory(readable_checkpoint(path)));
  path_ = directory->path();
  index_ = read_index(*directory);
  check_whole(index_, path_ + "/" + kIndexFile);
  open_source_ = [directory, id = index_.id](const std::string& name) {
    return open_rank_file(*directory, name, id);
  };
}

ChunkReader::ChunkReader(std::string path, CheckpointIndex index, OpenSource open)
    : path_(std::move(path)), open_source_(std::move(open)), index_(std::move(index)) {
  check_whole(index_, path_);
}

// Returns the file that contains the chunk. The numbers of the index are checked already. All
// access to a chunk's bytes goes through this function.
const ChunkSource& ChunkReader::open_chunk(const TensorRecord& tensor, const ChunkRecord& chunk) {
  auto it = open_.find(chunk.file);
  if (it == open_.end()) {
    auto source = open_source_(chunk.file);
    if (open_.size() >= kMostOpen) open_.clear();
    it = open_.emplace(chunk.file, std::move(source)).first;
  }
  it->second->check(chunk.key, tensor.dtype, chunk.region.numel());
  return *it->second;
}

void ChunkReader::check(const TensorRecord& tensor, at::IntArrayRef strides, const Region& region) {
  const bool reorders =
      !is_same_order(tensor.shape, order_of(tensor, strides, region), tensor.strides);
  for (const ChunkRecord& chunk : tensor.chunks)
    if (reorders || overlap(chunk.region, region)) open_chunk(tensor, chunk);
}

void ChunkReader::check(const TensorRecord& tensor) {
  for (const ChunkRecord& chunk : tensor.chunks) open_chunk(tensor, chunk);
}

void ChunkReader::verify(const TensorRecord& tensor, const ChunkRecord& chunk) {
  const int64_t item = item_size(tensor.dtype), nbytes = chunk.region.numel() * item;
  CheckedBytes bytes(open_chunk(tensor, chunk), chunk, nbytes, block_);
  std::vector<char> out(static_cast<size_t>(kChecksumBlock));
  for (int64_t begin = 0; begin < nbytes; begin += kChecksumBlock)
    bytes.read(begin, std::min(kChecksumBlock, nbytes - begin), out.data());
}

void ChunkReader::read_stored(const TensorRecord& tensor, const Region& region, void* out) {
  const int64_t item = item_size(tensor.dtype);
  for (const ChunkRecord& chunk : tensor.chunks) {
    std::optional<CheckedBytes> bytes;
    for_each_overlap(chunk.region, region, [&](const Overlap& common) {
      if (!bytes)
        bytes.emplace(open_chunk(tensor, chunk), chunk, chunk.region.numel() * item, block_);
      bytes->read(common.a * item, common.count * item, static_cast<char*>(out) + common.b * item);
    });
  }
}

at::Tensor ChunkReader::read_reordered(const TensorRecord& tensor, at::IntArrayRef strides) {
  const int64_t numel = tensor.numel();
  const auto dtype = scalar_type_of(tensor.dtype);
  at::Tensor stored;  // a sparse file may say that it has more than there is memory
  naming_part("'" + path_ + "': " + tensor.id(), [&] { stored = at::empty({numel}, dtype); });
  read_stored(tensor, {0, numel}, stored.mutable_data_ptr());
  if (is_same_order(tensor.shape, strides, tensor.strides)) return stored;
  at::Tensor ordered = at::empty_strided(tensor.shape, strides, dtype);
  ordered.copy_(at::as_strided(stored, tensor.shape, tensor.strides));
  return at::as_strided(ordered, {numel}, {1});
}

at::Tensor ChunkReader::read_whole(const TensorRecord& tensor) {
  check(tensor);
  return read_reordered(tensor, row_major(tensor.shape)).view(tensor.shape);
}

void ChunkReader::read(const TensorRecord& tensor, at::IntArrayRef strides, const Region& region,
                       const at::Tensor& out) {
  const std::vector<int64_t> order = order_of(tensor, strides, region);
  const bool reorders = !is_same_order(tensor.shape, order, tensor.strides);
  const bool fits = out.is_cpu() && out.is_contiguous() && !has_math_bits(out) &&
                    out.scalar_type() == scalar_type_of(tensor.dtype);
  if (!reorders && fits) return read_stored(tensor, region, out.mutable_data_ptr());
  const at::Tensor staged = at::empty({region.numel()}, scalar_type_of(tensor.dtype));
  if (reorders) {
    const at::Tensor whole = read_reordered(tensor, order);
    for_each_overlap({0, tensor.numel()}, region, [&](const Overlap& common) {
      staged.narrow(0, common.b, common.count).copy_(whole.narrow(0, common.a, common.count));
    });
  } else {
    read_stored(tensor, region, staged.mutable_data_ptr());
  }
  out.copy_(staged.view(out.sizes()));
}

}  // namespace tessera
