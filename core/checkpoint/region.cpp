#include "checkpoint/region.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/files/untrusted.h"

namespace tessera {
namespace {

/// Iterates over the runs of a region: elements that are consecutive in the tensor, too.
class Runs {
 public:
  explicit Runs(const Region& region) : region_(region), position_(region.begin) {
    if (region.box) measure(*region.box);
    place();
  }

  bool done() const { return position_ >= region_.end; }
  int64_t first() const { return first_; }  // in the tensor
  int64_t last() const { return first_ + count_; }
  /// Returns the position in the region of an element of the tensor. The run must contain it.
  int64_t position(int64_t element) const { return position_ - region_.begin + (element - first_); }
  void next() {
    position_ += count_;
    place();
  }

 private:
  // Dims after the last one that is cut are whole: together with it they make one run.
  void measure(const Box& box) {
    int64_t stride = 1;
    size_t dim = box.shape.size();
    bool whole = true;
    while (dim-- > 0) {
      if (whole) {
        length_ *= box.sizes[dim];
        whole = box.sizes[dim] == box.shape[dim];
      } else {
        outer_.push_back({box.sizes[dim], stride});
      }
      origin_ += box.offset[dim] * stride;
      stride *= box.shape[dim];
    }
  }

  void place() {
    if (done()) return;
    if (!region_.box) {
      first_ = position_;
      count_ = region_.end - position_;
      return;
    }
    const int64_t inside = position_ % length_;
    int64_t run = position_ / length_;
    first_ = origin_ + inside;
    for (const auto& [size, stride] : outer_) {
      first_ += run % size * stride;
      run /= size;
    }
    count_ = std::min(length_ - inside, region_.end - position_);
  }

  const Region& region_;
  int64_t length_ = 1, origin_ = 0;                 // of a box's runs; of its first element
  std::vector<std::pair<int64_t, int64_t>> outer_;  // size and stride of dims, innermost first
  int64_t position_ = 0, first_ = 0, count_ = 0;
};

bool are_apart(const Box& a, const Box& b) {
  for (size_t dim = 0; dim < a.shape.size(); ++dim) {
    if (a.offset[dim] + a.sizes[dim] <= b.offset[dim] ||
        b.offset[dim] + b.sizes[dim] <= a.offset[dim])
      return true;
  }
  return false;
}

// The ranges of one box must cover it exactly.
std::string describe_gap_in_box(int64_t numel, std::vector<const Region*> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Region* a, const Region* b) { return a->begin < b->begin; });
  int64_t end = 0;
  for (const Region* range : ranges) {
    if (range->begin != end || range->end <= end)
      return fmt::format("has a gap or an overlap at element {}", end);
    end = range->end;
  }
  if (end != numel) return fmt::format("has {} elements, but {} are stored", numel, end);
  return "";
}

// Checks that boxes of one shape are disjoint, without comparing all pairs: the parts of a mesh are
// cut apart along one dim, each group along another, and so on. Boxes that can't be cut apart are
// compared, if they are few.
class BoxSeparation {
 public:
  explicit BoxSeparation(std::vector<const Box*> boxes)
      : most_work_(4'000'000 + 64 * boxes.size()) {
    left_.push_back(std::move(boxes));
  }

  /// Returns the problem; empty if there is none.
  std::string describe() {
    while (!left_.empty()) {
      std::vector<const Box*> boxes = std::move(left_.back());
      left_.pop_back();
      if (boxes.size() < 2 || cut(boxes)) continue;
      work_ += boxes.size() * boxes.size();
      if (work_ > most_work_) return "has pieces that are cut in too many ways";
      for (size_t i = 0; i < boxes.size(); ++i)
        for (size_t other = 0; other < i; ++other)
          if (!are_apart(*boxes[i], *boxes[other])) return "has pieces that overlap";
    }
    return work_ > most_work_ ? "has pieces that are cut in too many ways" : "";
  }

 private:
  // Cuts them along the first dim where that is possible, and leaves the resulting groups to do.
  bool cut(std::vector<const Box*>& boxes) {
    const size_t dims = boxes.front()->shape.size(), before = left_.size();
    for (size_t dim = 0; dim < dims && work_ <= most_work_; ++dim) {
      work_ += boxes.size();
      std::sort(boxes.begin(), boxes.end(),
                [&](const Box* a, const Box* b) { return a->offset[dim] < b->offset[dim]; });
      int64_t end = 0;
      for (const Box* box : boxes) {
        if (box->offset[dim] >= end || left_.size() == before) left_.emplace_back();
        left_.back().push_back(box);
        end = std::max(end, box->offset[dim] + box->sizes[dim]);
      }
      if (left_.size() > before + 1) return true;
      left_.pop_back();
    }
    return work_ > most_work_;
  }

  std::vector<std::vector<const Box*>> left_;
  size_t most_work_, work_ = 0;
};

}  // namespace

int64_t Box::numel() const { return CheckedShape(sizes).numel(); }

void for_each_overlap(const Region& a, const Region& b,
                      const std::function<void(const Overlap&)>& visit) {
  Runs x(a), y(b);
  while (!x.done() && !y.done()) {
    const int64_t from = std::max(x.first(), y.first()), to = std::min(x.last(), y.last());
    if (from < to) visit({x.position(from), y.position(from), to - from});
    x.last() <= y.last() ? x.next() : y.next();
  }
}

bool overlap(const Region& a, const Region& b) {
  if (a.box && b.box && a.box->shape == b.box->shape && are_apart(*a.box, *b.box)) return false;
  bool found = false;
  for_each_overlap(a, b, [&](const Overlap&) { found = true; });
  return found;
}

std::string describe_gap(int64_t numel, const std::vector<const Region*>& regions) {
  std::map<std::optional<Box>, std::vector<const Region*>> boxes;
  for (const Region* region : regions) boxes[region->box].push_back(region);
  int64_t stored = 0;
  std::vector<const Box*> different;
  for (const auto& [box, ranges] : boxes) {
    const int64_t size = box ? box->numel() : numel;
    const std::string gap = describe_gap_in_box(size, ranges);
    if (!gap.empty()) return gap;
    if (boxes.size() > 1 && (!box || box->shape != boxes.rbegin()->first->shape))
      return "has pieces that overlap";
    if (box) different.push_back(&*box);
    if (size > numel - stored) return "has pieces that overlap";
    stored += size;
  }
  if (stored != numel) return fmt::format("has {} elements, but {} are stored", numel, stored);
  return BoxSeparation(std::move(different)).describe();
}

}  // namespace tessera
