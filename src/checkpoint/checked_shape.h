#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace tessera {

/// The sizes of a tensor that somebody else has written down: in a file, on a command line. Every
/// number of a file that becomes a size of memory, or a place in it, goes through here.
class CheckedShape {
 public:
  /// `item`: bytes of an element. `sizes` must outlive this. Throws `c10::ValueError` unless sizes
  /// are 0 or more, at most `kMostDims`, and the bytes can be counted, also of a tensor that has 1
  /// in place of each 0.
  explicit CheckedShape(c10::IntArrayRef sizes, int64_t item = 1);

  int64_t numel() const { return numel_; }
  int64_t nbytes() const { return numel_ * item_; }

  /// True if the elements [offset, offset + sizes) along every dim are elements of it, and there
  /// are some.
  bool has_box(c10::IntArrayRef offset, c10::IntArrayRef sizes) const;
  /// True if these strides put the elements one after another: no gap, none twice.
  bool is_dense(c10::IntArrayRef strides) const;
  /// Elements from the first one to behind the last one that these strides reach. Throws
  /// `c10::ValueError` for strides that are negative, too few or too many, or reach too far.
  int64_t reach(c10::IntArrayRef strides) const;

  /// More than any tensor has that was in use: LibTorch reduces over 64 at most.
  static constexpr size_t kMostDims = 64;

 private:
  c10::IntArrayRef sizes_;
  int64_t item_, numel_ = 1;
};

/// True if [begin, begin + count) is part of [0, size), whatever the numbers are.
constexpr bool is_inside(int64_t begin, int64_t count, int64_t size) {
  return begin >= 0 && count >= 0 && begin <= size && count <= size - begin;
}

/// Throws `c10::ValueError` if the sum can't be counted.
int64_t checked_sum(int64_t a, int64_t b);
int64_t checked_product(int64_t a, int64_t b);

}  // namespace tessera
