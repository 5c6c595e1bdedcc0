#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace tessera {

// Numbers, texts and bytes from untrusted sources: files and command lines. Functions that refuse
// them throw `c10::ValueError`.

/// The sizes of a tensor from an untrusted source. Every number of a file that becomes a size of
/// memory, or an offset into it, is checked here.
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

/// Returns the beginning of a text, for a message.
inline std::string shortened(std::string_view text, size_t most = 100) {
  return text.size() <= most ? std::string(text) : std::string(text.substr(0, most)) + "...";
}

/// Returns the first items of a list, and the number of others.
std::string shortened(const std::vector<std::string>& items);

/// Throws `c10::ValueError` unless `name`, taken from an index, can name a file beside it.
void check_file_name(const std::string& name);

/// Calls `f`, and prefixes its errors with `part`, the name of a part of a file.
template <class F>
void naming_part(const std::string& part, F&& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, part, ": ", error.what_without_backtrace());
  }
}

/// Reads the bytes of a file in order. Throws `c10::ValueError` on a read past the end.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  std::string_view take(uint64_t count) {
    TORCH_CHECK_VALUE(count <= bytes_.size() - next_, "it is cut off: ", count,
                      " bytes are expected after its first ", next_, ", and it has ",
                      bytes_.size());
    next_ += count;
    return bytes_.substr(next_ - count, count);
  }
  /// Reads a little-endian number.
  template <class T>
  T number() {
    static_assert(std::is_integral_v<T>);
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  /// Returns the next line, without its newline.
  std::string_view line() {
    const size_t end = bytes_.find('\n', next_);
    TORCH_CHECK_VALUE(end != std::string_view::npos, "it is cut off: a line has no end");
    const std::string_view text = take(end - next_);
    take(1);
    return text;
  }

  size_t left() const { return bytes_.size() - next_; }

 private:
  std::string_view bytes_;
  size_t next_ = 0;
};

}  // namespace tessera
