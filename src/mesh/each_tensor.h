#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace tessera {

/// Calls `f` with each defined tensor in an operator's argument: itself, or those of a list.
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

}  // namespace tessera
