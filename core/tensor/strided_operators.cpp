#include "tensor/strided_operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

namespace tessera {
namespace {

// The start that such a call asks for, relative to that of its tensor.
int64_t asked_offset(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  const c10::IValue& asked = arguments[*schema.argumentIndexWithName("storage_offset")];
  return asked.isNone() ? 0 : asked.toInt() - arguments[0].toTensor().storage_offset();
}

}  // namespace

bool takes_strides(const c10::FunctionSchema& schema) {
  return schema.name().starts_with("aten::as_strided");
}

void check_own_elements(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  if (!takes_strides(schema)) return;
  const at::Tensor tensor = arguments[0].toTensor();
  const auto sizes = arguments[*schema.argumentIndexWithName("size")].toIntVector();
  const auto strides = arguments[*schema.argumentIndexWithName("stride")].toIntVector();
  const int64_t offset = asked_offset(schema, arguments);
  bool are_own = offset >= 0;
  if (are_own && !tensor.is_non_overlapping_and_dense() && tensor.numel() > 0) {
    const auto end_of = [](at::IntArrayRef sizes, at::IntArrayRef strides) {
      return static_cast<int64_t>(at::detail::computeStorageNbytes(sizes, strides, 1));
    };
    const at::Tensor is_own = at::zeros({end_of(tensor.sizes(), tensor.strides())}, at::kBool);
    is_own.as_strided(tensor.sizes(), tensor.strides()).fill_(true);
    are_own = offset + end_of(sizes, strides) <= is_own.numel() &&
              is_own.as_strided(sizes, strides, offset).all().item().toBool();
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      are_own, "[", schema.name(),
      "] a DistTensor can show its own elements alone, not what lies between or before them in "
      "memory; got sizes ",
      at::IntArrayRef(sizes), ", strides ", at::IntArrayRef(strides), ", ", offset,
      " elements behind the start of a tensor of sizes ", tensor.sizes(), " and strides ",
      tensor.strides(), ". Call it on the tensor that has these elements");
}

at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& part) {
  if (part.strides() == tensor.strides()) return part;
  at::Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(), part.options());
  if (part.is_conj()) result = result._conj();
  if (part.is_neg()) result = result._neg_view();
  return result.copy_(part);
}

void shift_offset(const c10::FunctionSchema& schema, const Stack& arguments, Stack& local) {
  if (!takes_strides(schema)) return;
  check_own_elements(schema, arguments);
  local[*schema.argumentIndexWithName("storage_offset")] =
      asked_offset(schema, arguments) + local[0].toTensor().storage_offset();
}

}  // namespace tessera
