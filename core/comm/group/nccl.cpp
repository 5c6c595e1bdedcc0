// Built where LibTorch has CUDA; see no_nccl.cpp.
#define USE_C10D_NCCL
#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/device/device.h"
#include "comm/group/registered_backends.h"

namespace tessera {

RegisteredBackend nccl_backend() {
  return {c10::DeviceType::CUDA,
          [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
            TORCH_CHECK_NOT_IMPLEMENTED(
                has_device(c10::DeviceType::CUDA),
                "[nccl] NCCL needs a CUDA device; LibTorch has CUDA here, but this process has ",
                devices_text());
            auto options = c10d::ProcessGroupNCCL::Options::create();
            options->timeout = timeout;
            return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
          }};
}

}  // namespace tessera
