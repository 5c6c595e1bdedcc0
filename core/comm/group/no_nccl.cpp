// Built in place of nccl.cpp where LibTorch has no CUDA.
#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/group/registered_backends.h"

namespace tessera {

RegisteredBackend nccl_backend() {
  return {c10::DeviceType::CUDA, [](const auto&...) -> c10::intrusive_ptr<c10d::Backend> {
            TORCH_CHECK_NOT_IMPLEMENTED(
                false,
                "[nccl] NCCL needs a LibTorch with CUDA, and nccl.h when Tessera is built; this "
                "Tessera was built without one of them (the output of its configuration says "
                "which). Use the backend 'gloo'.");
          }};
}

}  // namespace tessera
