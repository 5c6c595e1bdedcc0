#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace tessera {

/// Reads the bytes of an untrusted file in order. Throws `c10::ValueError` on a read past the end.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  std::string_view take(uint64_t count) {
    TORCH_CHECK_VALUE(count <= bytes_.size() - next_, "it is cut off: ", count,
                      " bytes are expected after its first ", next_, ", and it has ", bytes_.size());
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

  bool done() const { return next_ == bytes_.size(); }
  size_t left() const { return bytes_.size() - next_; }

 private:
  std::string_view bytes_;
  size_t next_ = 0;
};

}  // namespace tessera
