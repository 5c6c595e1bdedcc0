#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include "offload/state_memory.h"

namespace tessera {
namespace {

// Page-locked if there is a GPU to copy from and to.
class HostMemory : public StateMemory {
 public:
  at::Tensor empty(int64_t numel, at::ScalarType dtype) override {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).pinned_memory(at::hasCUDA()));
  }
  void reserve(const std::vector<int64_t>&) override {}
  bool is_ordinary() const override { return !at::hasCUDA(); }
  bool holds(const at::Tensor& tensor) const override { return tensor.device().is_cpu(); }
};

}  // namespace

std::shared_ptr<StateMemory> host_memory() { return std::make_shared<HostMemory>(); }

}  // namespace tessera
