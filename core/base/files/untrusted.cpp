#include "base/files/untrusted.h"

#include <c10/util/safe_numerics.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera {

CheckedShape::CheckedShape(c10::IntArrayRef sizes, int64_t item) : sizes_(sizes), item_(item) {
  TORCH_CHECK_VALUE(sizes.size() <= kMostDims, "a tensor must have at most ", kMostDims,
                    " dims; got ", sizes.size());
  int64_t most = item;
  bool is_empty = false;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "sizes must be 0 or more; got ", size);
    TORCH_CHECK_VALUE(!c10::mul_overflows(most, std::max<int64_t>(size, 1), &most),
                      "sizes must be those of a tensor whose bytes can be counted in 64 bits; got ",
                      sizes);
    is_empty = is_empty || size == 0;
  }
  numel_ = is_empty ? 0 : most / item;
}

bool CheckedShape::has_box(c10::IntArrayRef offset, c10::IntArrayRef sizes) const {
  if (offset.size() != sizes_.size() || sizes.size() != sizes_.size()) return false;
  for (size_t dim = 0; dim < sizes_.size(); ++dim) {
    if (sizes[dim] < 1 || !is_inside(offset[dim], sizes[dim], sizes_[dim])) return false;
  }
  return true;
}

// In a dense layout, the dim with the smallest stride is filled first, then the next, and so on.
bool CheckedShape::is_dense(c10::IntArrayRef strides) const {
  if (strides.size() != sizes_.size()) return false;
  if (numel_ == 0) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (size_t dim = 0; dim < sizes_.size(); ++dim)
    if (sizes_[dim] != 1) dims.emplace_back(strides[dim], sizes_[dim]);
  std::sort(dims.begin(), dims.end());
  int64_t filled = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != filled) return false;
    filled *= size;
  }
  return true;
}

int64_t CheckedShape::reach(c10::IntArrayRef strides) const {
  TORCH_CHECK_VALUE(strides.size() == sizes_.size(), "there must be a stride for each of ",
                    sizes_.size(), " sizes; got ", strides.size());
  int64_t last = 0;
  for (size_t dim = 0; dim < sizes_.size(); ++dim) {
    TORCH_CHECK_VALUE(strides[dim] >= 0, "strides must be 0 or more; got ", strides[dim]);
    if (numel_ > 0) last = checked_sum(last, checked_product(sizes_[dim] - 1, strides[dim]));
  }
  return numel_ == 0 ? 0 : checked_sum(last, 1);
}

int64_t checked_sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  TORCH_CHECK_VALUE(!c10::add_overflows(a, b, &sum), a, " and ", b,
                    " must have a sum that can be counted in 64 bits");
  return sum;
}

int64_t checked_product(int64_t a, int64_t b) {
  int64_t product = 0;
  TORCH_CHECK_VALUE(!c10::mul_overflows(a, b, &product), a, " times ", b,
                    " must be a number that can be counted in 64 bits");
  return product;
}

std::string shortened(const std::vector<std::string>& items) {
  const size_t shown = std::min<size_t>(items.size(), 10);
  std::string text = fmt::format("{}", fmt::join(items.begin(), items.begin() + shown, ", "));
  if (shown < items.size()) text += fmt::format(" and {} more", items.size() - shown);
  return text;
}

void check_file_name(const std::string& name) {
  constexpr size_t kMostBytes = 255;  // the limit of Linux's file systems
  const bool is_plain = name.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
  TORCH_CHECK_VALUE(
      is_plain && !name.empty() && name.size() <= kMostBytes && name != "." && name != "..", "'",
      shortened(name), "' must be the name of a file beside the index");
}

}  // namespace tessera
