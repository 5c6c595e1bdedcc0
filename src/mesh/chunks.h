#pragma once

#include <c10/util/ArrayRef.h>
#include <tessera/placement.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// Indices of a tensor dim, `begin` to `end - 1`.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// Part `index` of `size` elements that are cut into `parts` parts as `torch::chunk` cuts; there
/// are always `parts` of them, of which the last may be empty. An empty part lies at the end.
Range chunk(int64_t size, int64_t parts, int64_t index);

/// What the rank at `coordinate` of a mesh has of a tensor of `global_sizes`: a range for each
/// tensor dim. `placements` are normalized; none is split, as its parts are several ranges.
std::vector<Range> local_box(c10::IntArrayRef global_sizes, const Placements& placements,
                             c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate);

/// How much the rank has along each dim, also where placements are split.
std::vector<int64_t> local_sizes(c10::IntArrayRef global_sizes, const Placements& placements,
                                 c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate);

/// `placements` with split factors of 1.
Placements without_splits(Placements placements);

}  // namespace tessera
