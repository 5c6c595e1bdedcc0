#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace tessera {

/// Calls `f` with each defined tensor in an operator's argument: the tensor itself, or those of a
/// list.
template <class F>
void each_tensor(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) f(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) f(element.toTensor());
    }
  }
}

/// Returns `value` with each defined tensor in it replaced by the result of `f`.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(tensor.defined() ? f(tensor) : tensor);
    return list;
  }
  if (value.isList()) {
    c10::List<c10::IValue> list(value.toList().elementType());
    for (const c10::IValue& element : value.toListRef()) list.push_back(map_tensors(element, f));
    return list;
  }
  return value;
}

}  // namespace tessera
