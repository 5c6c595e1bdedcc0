#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// What lies in [offset, offset + sizes) of a tensor along every dim. `shape` is the tensor's, or
/// one that cuts its dims further and keeps the order of its elements.
struct Box {
  std::vector<int64_t> shape, offset, sizes;

  int64_t numel() const;
  bool operator==(const Box&) const = default;
  auto operator<=>(const Box&) const = default;
};

/// Elements [begin, end) of a box, counted row by row; without a box, of the whole tensor in the
/// order of its memory.
struct Region {
  int64_t begin = 0, end = 0;
  std::optional<Box> box = std::nullopt;

  int64_t numel() const { return end - begin; }
};

/// `count` elements that two regions have in common, consecutive in both; `a` and `b` say where,
/// from the beginning of each region.
struct Overlap {
  int64_t a = 0, b = 0, count = 0;
};

/// Calls `visit` with everything that two regions of one tensor have in common, ascending in both.
void for_each_overlap(const Region& a, const Region& b,
                      const std::function<void(const Overlap&)>& visit);

/// True if they have an element in common.
bool overlap(const Region& a, const Region& b);

/// Empty if the regions, in any order, are each element of a tensor of `numel` elements once; else
/// what is wrong. Boxes must lie in the tensor, and be equal or have nothing in common. Boxes that
/// are neither cut out of a grid nor few are refused, too: see `BoxSeparation`.
std::string describe_gap(int64_t numel, const std::vector<const Region*>& regions);

}  // namespace tessera
