// Built where LibTorch has CUDA; see no_nccl.cpp.
#define USE_C10D_NCCL
#include <tessera/process_group.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace tessera {

ProcessGroupPtr nccl_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return backend_process_group(
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options), timeout);
}

}  // namespace tessera
