#include <ATen/core/Tensor.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "tensor/decompositions.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

// [Note: Views by strides]
//
// Autograd writes the gradient of a view into that of its base through `as_strided`. That describes
// the view by positions in the memory of the base; a DistTensor has none. Sizes and strides of a
// part that was sliced, selected or transposed lead back to these operators, whose views of local
// parts need no other rank's elements.

// A range of one dim of the base, with a step.
struct StridedRange {
  int64_t start = 0, count = 1, step = 1;
};

// Dims in order of their strides, the largest first.
std::vector<int64_t> outer_first(const at::Tensor& base) {
  std::vector<int64_t> dims(base.dim());
  std::iota(dims.begin(), dims.end(), 0);
  std::ranges::stable_sort(dims,
                           [&](int64_t a, int64_t b) { return base.stride(a) > base.stride(b); });
  return dims;
}

// Positions in memory name one element each: no dim reaches into the next outer one.
bool is_plain(const at::Tensor& base, const std::vector<int64_t>& dims) {
  int64_t reach = 1;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    if (base.size(*dim) == 0 || (base.size(*dim) > 1 && base.stride(*dim) < reach)) return false;
    if (base.size(*dim) > 1) reach = base.stride(*dim) * base.size(*dim);
  }
  return true;
}

// A view of `base`: a range of each of its dims, and for each dim of the view the dim of the base;
// -1 for a dim of one element that is added.
struct StridedPart {
  std::vector<StridedRange> ranges;
  std::vector<int64_t> dims;
};

std::optional<StridedPart> find_part(const at::Tensor& base, const std::vector<int64_t>& sizes,
                                     const std::vector<int64_t>& strides, int64_t offset) {
  const auto dims = outer_first(base);
  if (offset < 0 || !is_plain(base, dims)) return std::nullopt;
  StridedPart part{std::vector<StridedRange>(base.dim()), std::vector<int64_t>(sizes.size(), -1)};
  for (const int64_t d : dims) {
    if (base.size(d) == 1) continue;
    part.ranges[d].start = offset / base.stride(d);
    offset %= base.stride(d);
  }
  if (offset != 0) return std::nullopt;
  std::vector<bool> is_used(base.dim());
  for (size_t e = 0; e < sizes.size(); ++e) {
    if (sizes[e] == 1) continue;
    const auto fits = [&](int64_t d) {
      return !is_used[d] && base.size(d) > 1 && strides[e] >= base.stride(d) &&
             strides[e] % base.stride(d) == 0;
    };
    const auto found = std::ranges::find_if(dims, fits);
    if (found == dims.end() || sizes[e] == 0) return std::nullopt;
    part.dims[e] = *found;
    is_used[*found] = true;
    part.ranges[*found].count = sizes[e];
    part.ranges[*found].step = strides[e] / base.stride(*found);
  }
  for (int64_t d = 0; d < base.dim(); ++d) {
    const auto& [start, count, step] = part.ranges[d];
    if (start + (count - 1) * step >= base.size(d)) return std::nullopt;
  }
  return part;
}

at::Tensor view_of_part(const at::Tensor& base, const StridedPart& part) {
  at::Tensor view = base;
  for (int64_t d = 0; d < base.dim(); ++d) {
    const auto& [start, count, step] = part.ranges[d];
    if (count < base.size(d)) view = view.slice(d, start, start + (count - 1) * step + 1, step);
  }
  std::vector<int64_t> kept;  // dims of the base, in order
  for (int64_t d = base.dim() - 1; d >= 0; --d) {
    if (std::ranges::find(part.dims, d) == part.dims.end()) {
      view = view.select(d, 0);
    } else {
      kept.insert(kept.begin(), d);
    }
  }
  std::vector<int64_t> order;
  for (const int64_t d : part.dims) {
    if (d >= 0) order.push_back(std::ranges::find(kept, d) - kept.begin());
  }
  view = view.permute(order);
  for (size_t e = 0; e < part.dims.size(); ++e) {
    if (part.dims[e] < 0) view = view.unsqueeze(static_cast<int64_t>(e));
  }
  return view;
}

bool as_strided(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const c10::IValue& given = call.argument("storage_offset");
  const int64_t offset = given.isNone() ? 0 : given.toInt() - self.storage_offset();
  const auto part = find_part(self, call.argument("size").toIntVector(),
                              call.argument("stride").toIntVector(), offset);
  return part && finish(op, stack, {view_of_part(self, *part)});
}

// The answer needs no elements.
bool is_same_size(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const bool is_same = call.tensor("self").sizes() == call.tensor("other").sizes();
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.emplace_back(is_same);
  return true;
}

constexpr DecompositionEntry kViews[] = {
    {"as_strided", as_strided},
    {"is_same_size", is_same_size},
};

}  // namespace

std::span<const DecompositionEntry> view_decompositions() { return kViews; }

}  // namespace tessera
