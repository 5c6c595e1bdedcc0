#include "group/host_all_reduce.h"

namespace tessera {

void host_all_reduce(ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                     const CollectiveTag& tag) {
  if (process_group.size() == 1) return;
  if (process_group.backend_name() != "nccl") {
    process_group.all_reduce(tensor, op, tag)->wait();
    return;
  }
  const at::Tensor on_device = tensor.to(at::kCUDA);
  process_group.all_reduce(on_device, op, tag)->wait();
  tensor.copy_(on_device);
}

}  // namespace tessera
