// Built in place of nccl.cpp where LibTorch has no CUDA.
#include <c10/util/Exception.h>
#include <tessera/process_group.h>

namespace tessera {

ProcessGroupPtr nccl_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   std::chrono::milliseconds timeout) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "[nccl_process_group] NCCL needs a LibTorch with CUDA; this Tessera was "
                              "built against one without it. Use the backend 'gloo'.");
}

}  // namespace tessera
