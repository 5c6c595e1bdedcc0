#include "tensor/decompositions.h"

#include <ATen/ops/ctc_loss_native.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/tensor_split_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/dispatch/each_tensor.h"

namespace tessera {
namespace {

// If no gradient is required, LibTorch's own form reads the memory of the tensor, and makes a
// contiguous result.
at::Tensor max_pool1d(const at::Tensor& self, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  const at::Tensor result = std::get<0>(
      at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
  return at::GradMode::is_enabled() && self.requires_grad() ? result : result.contiguous();
}

// LibTorch's own forms of the following write a gradient into an ordinary tensor of zeros. Ranks
// outside of the mesh can't do that: they would go on with zeros.
at::Tensor selected_backward(const at::Tensor& grad, int64_t dim, const at::Tensor& indices,
                             c10::SymIntArrayRef sizes, bool keepdim) {
  const bool has_dim = keepdim || sizes.empty();
  const auto with_dim = [&](const at::Tensor& x) { return has_dim ? x : x.unsqueeze(dim); };
  return grad.new_zeros(C10_AS_INTARRAYREF_SLOW(sizes))
      .scatter(dim, with_dim(indices), with_dim(grad));
}

at::Tensor cummaxmin_backward(const at::Tensor& grad, const at::Tensor& input,
                              const at::Tensor& indices, int64_t dim) {
  return at::zeros_like(input).scatter_add(dim, indices, grad);
}

at::Tensor trace_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes) {
  const auto matrix = C10_AS_INTARRAYREF_SLOW(sizes);
  const at::Tensor diagonal =
      at::eye(matrix[0], matrix[1], at::dtype(at::kBool).device(grad.device()));
  return at::where(diagonal, grad, grad.new_zeros({}));
}

// Two that read the memory of numbers given as tensors.

at::Tensor whole(const char* function, const char* name, const at::Tensor& numbers) {
  if (!is_dist(numbers)) return numbers;
  TORCH_CHECK_NOT_IMPLEMENTED(mesh_of(numbers).is_member(), "[", function,
                              "] only ranks of the mesh can call this operator, because the sizes "
                              "of its result depend on the values of `",
                              name, "`; this rank is not in ", mesh_of(numbers).to_string());
  return full_tensor(numbers);
}

at::Tensor ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets,
                    const at::Tensor& input_lengths, const at::Tensor& target_lengths,
                    int64_t blank, int64_t reduction, bool zero_infinity) {
  return at::native::ctc_loss(log_probs, targets, whole("ctc_loss", "input_lengths", input_lengths),
                              whole("ctc_loss", "target_lengths", target_lengths), blank, reduction,
                              zero_infinity);
}

std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& indices_or_sections,
                                     int64_t dim) {
  const at::Tensor numbers =
      whole("tensor_split", "tensor_indices_or_sections", indices_or_sections);
  return at::native::tensor_split(self, numbers, dim);
}

}  // namespace

const DecompositionEntry* find_decomposition(std::string_view name) {
  static const auto* const known = [] {
    auto* const map = new std::unordered_map<std::string, const DecompositionEntry*>();
    for (const auto family :
         {loss_decompositions(), reduction_decompositions(), batch_norm_decompositions(),
          view_decompositions(), embedding_bag_decompositions(), mask_decompositions()}) {
      for (const DecompositionEntry& entry : family)
        map->emplace("aten::" + std::string(entry.name), &entry);
    }
    return map;
  }();
  const auto found = known->find(std::string(name));
  return found == known->end() ? nullptr : found->second;
}

void register_composites() {
  static auto* const libraries = new std::vector<torch::Library>();
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse3, c10::DispatchKey::PrivateUse3}) {
    libraries->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    libraries->back().impl("max_pool1d", max_pool1d);
    libraries->back().impl("value_selecting_reduction_backward", selected_backward);
    libraries->back().impl("cummaxmin_backward", cummaxmin_backward);
    libraries->back().impl("trace_backward", trace_backward);
    libraries->back().impl("ctc_loss.Tensor", ctc_loss);
    libraries->back().impl("tensor_split.tensor_indices_or_sections", tensor_split);
  }
}

at::Tensor DecomposedCall::tensor(std::string_view name) const {
  const c10::IValue& value = argument(name);
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

torch::jit::Stack DecomposedCall::with(
    const std::vector<std::pair<std::string_view, c10::IValue>>& replaced) const {
  torch::jit::Stack copy(values.begin(), values.end());
  for (const auto& [name, value] : replaced) copy[find(name) - values.data()] = value;
  return copy;
}

bool DecomposedCall::any_placement(bool (*holds)(const Placement&)) const {
  bool any = false;
  for (const c10::IValue& value : values) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      if (meta) any |= std::ranges::any_of(meta->spec->placements, holds);
    });
  }
  return any;
}

bool DecomposedCall::any_cut() const {
  return any_placement([](const Placement& placement) { return is_shard(placement); });
}

bool DecomposedCall::any_not_whole() const {
  return any_placement([](const Placement& placement) { return !is_replicate(placement); });
}

bool finish(const c10::OperatorHandle& op, torch::jit::Stack& stack,
            const std::vector<at::Tensor>& results) {
  torch::jit::drop(stack, op.schema().arguments().size());
  for (const at::Tensor& result : results) stack.emplace_back(result);
  return true;
}

bool is_cut_along(const at::Tensor& tensor, int64_t dim) {
  const DistMeta* const meta = find_dist_meta(tensor);
  return meta && std::ranges::any_of(meta->spec->placements, [dim](const Placement& placement) {
           return is_shard(placement, dim);
         });
}

at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

}  // namespace tessera
