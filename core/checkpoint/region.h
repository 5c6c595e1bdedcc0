#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// The part [offset, offset + sizes) of a tensor along every dim. `shape` is the tensor's, or one
/// that cuts its dims further and keeps the order of its elements.
struct Box {
  std::vector<int64_t> shape, offset, sizes;

  int64_t numel() const;
  auto operator<=>(const Box&) const = default;
};

/// Elements [begin, end) of a box, counted row by row; without a box, of the whole tensor in the
/// order of its memory.
struct Region {
  int64_t begin = 0, end = 0;
  std::optional<Box> box = std::nullopt;

  int64_t numel() const { return end - begin; }
};

/// `count` elements that two regions have in common, consecutive in both; `a` and `b` are their
/// positions, from the beginning of each region.
struct Overlap {
  int64_t a = 0, b = 0, count = 0;
};

/// Calls `visit` for all elements that two regions of one tensor share, ascending in both.
void for_each_overlap(const Region& a, const Region& b,
                      const std::function<void(const Overlap&)>& visit);

/// Returns true if they have an element in common.
bool overlap(const Region& a, const Region& b);

/// Returns an empty text if the regions, in any order, contain each element of a tensor of `numel`
/// elements exactly once; else the problem. Boxes must lie in the tensor, and be equal or disjoint.
/// Boxes that are neither cut out of a grid nor few are refused, too: see `BoxSeparation`.
std::string describe_gap(int64_t numel, const std::vector<const Region*>& regions);

}  // namespace tessera
