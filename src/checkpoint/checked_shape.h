#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace tessera {

/// The sizes of a tensor from an untrusted source: a file or a command line. Every number of a file
/// that becomes a size of memory, or an offset into it, is checked here.
class CheckedShape {
 public:
  /// `item`: bytes per element. `sizes` must outlive this object. Throws `c10::ValueError` unless
  /// all sizes are 0 or more, there are at most `kMostDims`, and the number of bytes fits into 64
  /// bits, even with 1 in place of each 0.
  explicit CheckedShape(c10::IntArrayRef sizes, int64_t item = 1);

  int64_t numel() const { return numel_; }
  int64_t nbytes() const { return numel_ * item_; }

  /// Returns true if the box [offset, offset + sizes) is not empty and lies within the tensor along
  /// every dim.
  bool has_box(c10::IntArrayRef offset, c10::IntArrayRef sizes) const;
  /// Returns true if these strides place the elements one after another, without gaps or overlaps.
  bool is_dense(c10::IntArrayRef strides) const;
  /// Returns the number of elements from the first to the last one that these strides reach. Throws
  /// `c10::ValueError` if strides are negative, too few or too many, or if the number overflows.
  int64_t reach(c10::IntArrayRef strides) const;

  /// More than any practical tensor has: LibTorch reduces over 64 dims at most.
  static constexpr size_t kMostDims = 64;

 private:
  c10::IntArrayRef sizes_;
  int64_t item_, numel_ = 1;
};

/// Returns true if [begin, begin + count) is part of [0, size), for any numbers.
constexpr bool is_inside(int64_t begin, int64_t count, int64_t size) {
  return begin >= 0 && count >= 0 && begin <= size && count <= size - begin;
}

/// Throw `c10::ValueError` on overflow.
int64_t checked_sum(int64_t a, int64_t b);
int64_t checked_product(int64_t a, int64_t b);

}  // namespace tessera
