#include "base/dispatch/dry_run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <string_view>

#include "base/dispatch/each_tensor.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// True for a number of the program: it counts less than a tensor in type promotion. Python
// functions that replace kernels read it even where tensors have no data.
bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (is_number(tensor)) return tensor;
  at::Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(),
                                      tensor.options().device(at::kMeta).requires_grad(false));
  if (tensor.is_conj()) made = made._conj();
  return tensor.is_neg() ? made._neg_view() : made;
}

at::Tensor as_constants(const at::Tensor& tensor) {
  if (is_number(tensor)) return tensor;
  const bool may_be_index = c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
  return at::empty_strided(tensor.sizes(), tensor.strides(), at::dtype(tensor.scalar_type()))
      .fill_(may_be_index ? 0 : 1);
}

// True for operators whose last result, which backward alone reads, has other sizes by the meta
// functions of PyTorch's Python package than by the kernels.
bool misleads_on_meta(std::string_view name) {
  return name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only";
}

}  // namespace

bool has_sizes_by_values(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
  if (op.schema().name() != "aten::index") return true;
  bool has_mask = false;
  each_tensor(arguments[1], [&](const at::Tensor& index) {
    has_mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
  });
  return has_mask;
}

std::optional<Stack> run_on_meta(const c10::OperatorHandle& op,
                                 at::ArrayRef<c10::IValue> arguments) {
  // For some operators with sizes by values, the Python package has meta functions that raise.
  if (has_sizes_by_values(op, arguments) || misleads_on_meta(op.schema().name()))
    return std::nullopt;
  Stack stack;
  for (const c10::IValue& argument : arguments)
    stack.push_back(argument.isDevice() ? c10::IValue(c10::Device(c10::kMeta))
                                        : map_tensors(argument, on_meta));
  try {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (const std::exception& error) {
    // Functions of Python divide by the number of elements where kernels have a mean of none.
    if (!std::string_view(error.what()).starts_with("ZeroDivisionError")) throw;
    return std::nullopt;
  }
  return stack;
}

Stack run_on_constants(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  Stack stack;
  for (const c10::IValue& argument : arguments)
    stack.push_back(map_tensors(argument, as_constants));
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
  return stack;
}

}  // namespace tessera
