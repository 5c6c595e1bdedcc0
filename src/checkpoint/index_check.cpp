#include "checkpoint/index_check.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <unordered_set>

#include "checkpoint/checked_shape.h"
#include "checkpoint/checksum.h"
#include "checkpoint/file_name.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 6> kKinds = {"param",  "buffer", "state",
                                                    "master", "tensor", "rank"};

// Prefixes the errors of `f` with `part`, a part of the index.
template <class F>
void naming_part(const std::string& part, F&& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, part, ": ", error.what_without_backtrace());
  }
}

bool is_row_major(const TensorRecord& tensor) {
  int64_t stride = 1;
  for (size_t dim = tensor.shape.size(); dim-- > 0; stride *= tensor.shape[dim]) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != stride && tensor.numel() > 0) return false;
  }
  return true;
}

void check_box(const Box& box, const TensorRecord& tensor) {
  const CheckedShape shape(box.shape);
  TORCH_CHECK_VALUE(shape.numel() == tensor.numel() && shape.has_box(box.offset, box.sizes) &&
                        is_row_major(tensor),
                    "it is not in the tensor");
}

void check_chunk(const ChunkRecord& chunk, const TensorRecord& tensor) {
  check_file_name(chunk.file);
  const Region& region = chunk.region;
  if (region.box) naming_part("its box", [&] { check_box(*region.box, tensor); });
  const int64_t numel = region.box ? region.box->numel() : tensor.numel();
  TORCH_CHECK_VALUE(0 <= region.begin && region.begin < region.end && region.end <= numel,
                    "it must be some of ", numel, " elements; got ", region.begin, " to ",
                    region.end);
  const int64_t nbytes = region.numel() * item_size(tensor.dtype);
  const int64_t blocks = (nbytes - 1) / kChecksumBlock + 1;
  TORCH_CHECK_VALUE(std::ssize(chunk.checksums) == blocks, "its ", nbytes, " bytes must have ",
                    blocks, " checksums; got ", chunk.checksums.size());
}

void check_rank(const std::string& text, int world_size) {
  int rank = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  TORCH_CHECK_VALUE(error == std::errc() && end == text.data() + text.size() && rank >= 0 &&
                        rank < world_size,
                    "its rank must be one of ", world_size, "; got '", shortened(text), "'");
}

void check_parts(const TensorRecord& tensor, int world_size) {
  const CheckedShape shape(tensor.shape, item_size(tensor.dtype));
  shape.reach(tensor.strides);  // throws for invalid strides
  TORCH_CHECK_VALUE(shape.is_dense(tensor.strides), "its elements must lie one after another; got shape ",
                    c10::IntArrayRef(tensor.shape), " and strides ", c10::IntArrayRef(tensor.strides));
  if (tensor.kind == "rank") check_rank(tensor.state, world_size);
  for (const ChunkRecord& chunk : tensor.chunks) {
    naming_part("the piece '" + shortened(chunk.key) + "'", [&] { check_chunk(chunk, tensor); });
  }
}

}  // namespace

void check_record(const TensorRecord& tensor, int world_size) {
  TORCH_CHECK_VALUE(std::find(kKinds.begin(), kKinds.end(), tensor.kind) != kKinds.end(),
                    "a tensor is of the kind '", shortened(tensor.kind), "', which is not known here");
  TORCH_CHECK_VALUE(!tensor.names.empty(), "a tensor of the kind '", tensor.kind, "' has no name");
  naming_part("'" + shortened(tensor.id()) + "'", [&] { check_parts(tensor, world_size); });
}

void check_whole(const CheckpointIndex& index, const std::string& path) {
  naming_file("checkpoint", path, "can't be read", [&] {
    std::unordered_set<std::string> seen;
    for (const TensorRecord& tensor : index.tensors) {
      for (size_t name = 0; name < tensor.names.size(); ++name) {
        // Ranks give their own tensors the same names; `id()` includes the rank.
        TORCH_CHECK_VALUE(seen.insert(tensor.id(name)).second, "it has '",
                          shortened(tensor.id(name)), "' twice");
      }
      std::vector<const Region*> regions;
      for (const ChunkRecord& chunk : tensor.chunks) regions.push_back(&chunk.region);
      const std::string gap = describe_gap(tensor.numel(), regions);
      TORCH_CHECK_VALUE(gap.empty(), "the stored '", shortened(tensor.id()), "' ", gap);
    }
  });
}

int TensorRecord::rank() const { return std::stoi(state); }  // checked in `check_record()`

}  // namespace tessera
