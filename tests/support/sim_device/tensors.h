#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::testing::sim {

/// A CPU tensor over the memory of `tensor`, which kernels can read and write: over the alias of
/// device memory, or over host memory itself. Does not keep the memory alive.
at::Tensor kernel_view(const at::Tensor& tensor);

/// While it lives, the thread's operators reach plain kernels: no autograd, no autocast, and no
/// keys that the caller has included or excluded.
class PlainDispatch {
 public:
  PlainDispatch();

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  at::NoGradGuard no_grad_;
};

}  // namespace tessera::testing::sim
