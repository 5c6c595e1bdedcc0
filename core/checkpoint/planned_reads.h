#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/fit.h"
#include "checkpoint/model_view.h"
#include "checkpoint/region.h"
#include "engine/unit/note_write.h"
#include "tensor/dist_meta.h"

namespace tessera {

/// Returns the region of a DistTensor, or of an ordinary tensor: all of it.
inline Region region_of(const at::Tensor& tensor, const std::string& name) {
  const DistMeta* meta = find_dist_meta(tensor);
  return meta ? part_of(*meta->spec, tensor.sizes(), name) : Region{0, tensor.numel()};
}

/// The parts of stored tensors to read. Each is checked when it is added, before anything is
/// changed.
struct PlannedReads {
  explicit PlannedReads(ChunkReader given) : reader(std::move(given)), table(reader.index()) {}
  PlannedReads(const PlannedReads&) = delete;  // `table` refers to `reader`
  PlannedReads& operator=(const PlannedReads&) = delete;

  /// Does nothing without a source, and reads nothing for an empty region. `strides`: the memory
  /// order in which `region` counts elements. `users`: the user's tensors with the memory of `out`.
  void add(const TensorRecord* source, const std::vector<int64_t>& strides, Region region,
           at::Tensor out, const std::vector<at::Tensor>& users = {}) {
    if (!source) return;
    written.insert(written.end(), users.begin(), users.end());
    if (region.numel() == 0) return;
    reader.check(*source, strides, region);
    targets.push_back({source, strides, std::move(region), std::move(out)});
  }
  void read() {
    for (const at::Tensor& tensor : written) note_write(tensor);
    for (const Target& target : targets)
      reader.read(*target.source, target.strides, target.region, target.out);
  }

  /// A part of a stored tensor, and its destination in memory.
  struct Target {
    const TensorRecord* source;
    std::vector<int64_t> strides;
    Region region;
    at::Tensor out;
  };

  ChunkReader reader;
  TensorTable table;  ///< of the reader's index
  std::vector<Target> targets;
  std::vector<at::Tensor> written;  ///< the user's tensors
};

}  // namespace tessera
