#include "parallel/owned_runs.h"

#include <algorithm>

namespace tessera {
namespace {

// The ranges of the dim that the rank at `coordinate` has.
std::vector<Range> blocks_along(const DistSpec& spec, int64_t dim, const Range& range) {
  for (int64_t i = 0; i < spec.mesh.ndim(); ++i) {
    if (!is_split(spec.placements[i]) || !is_shard(spec.placements[i], dim)) continue;
    // A split is the only cut of its dim, and even.
    const int64_t factor = std::get<Shard>(spec.placements[i]).split_factor;
    const int64_t ranks = spec.mesh.size(i), rank = (*spec.mesh.coordinate())[i];
    const int64_t own = range.size() / (factor * ranks);
    std::vector<Range> blocks;
    for (int64_t block = 0; block < factor && own > 0; ++block) {
      const int64_t begin = (block * ranks + rank) * own;
      blocks.push_back({begin, begin + own});
    }
    return blocks;
  }
  return range.size() > 0 ? std::vector{range} : std::vector<Range>();
}

Placements without_splits_of(const DistSpec& spec) {
  Placements placements = spec.placements;
  for (Placement& placement : placements) {
    if (is_split(placement)) placement = Replicate{};
  }
  return placements;
}

}  // namespace

OwnedRuns::OwnedRuns(const DistSpec& spec, at::IntArrayRef sizes) {
  const auto box =
      local_box(sizes, without_splits_of(spec), spec.mesh.shape(), *spec.mesh.coordinate());
  int64_t stride = 1;
  for (int64_t d = static_cast<int64_t>(sizes.size()); d-- > 0;) {
    const auto blocks = blocks_along(spec, d, box[d]);
    is_done_ |= blocks.empty();
    const bool is_whole = blocks == std::vector{Range{0, sizes[d]}};
    // Dims behind the last one that is cut are part of its elements.
    if (!is_whole || !blocks_.empty() || d == 0) {
      blocks_.insert(blocks_.begin(), blocks);
      strides_.insert(strides_.begin(), stride);
    }
    stride *= sizes[d];
  }
  if (sizes.empty()) {
    blocks_ = {{Range{0, 1}}};
    strides_ = {1};
  }
  block_.assign(blocks_.size(), 0);
  if (is_done_) return;
  for (size_t d = 0; d + 1 < blocks_.size(); ++d) index_.push_back(blocks_[d][0].begin);
}

void OwnedRuns::advance() {
  if (++block_.back() < blocks_.back().size()) return;
  block_.back() = 0;
  for (size_t d = index_.size(); d-- > 0;) {
    if (++index_[d] < blocks_[d][block_[d]].end) return;
    if (++block_[d] < blocks_[d].size()) {
      index_[d] = blocks_[d][block_[d]].begin;
      return;
    }
    block_[d] = 0;
    index_[d] = blocks_[d][0].begin;
  }
  is_done_ = true;
}

std::optional<Range> OwnedRuns::next() {
  if (is_done_) return std::nullopt;
  const Range& last = blocks_.back()[block_.back()];
  int64_t begin = last.begin * strides_.back();
  for (size_t d = 0; d < index_.size(); ++d) begin += index_[d] * strides_[d];
  const Range run{begin, begin + last.size() * strides_.back()};
  advance();
  return run;
}

}  // namespace tessera
