#include "engine/offload/state_memory.h"

#include <ATen/ops/empty.h>

#include "base/device/device.h"

namespace tessera {
namespace {

// Page-locked if there is an accelerator, so that it copies without the host.
class HostMemory : public StateMemory {
 public:
  at::Tensor empty(int64_t numel, at::ScalarType dtype) override {
    return at::empty({numel},
                     at::TensorOptions().dtype(dtype).pinned_memory(accelerator().has_value()));
  }
  void reserve(const std::vector<int64_t>&) override {}
  bool is_ordinary() const override { return !accelerator(); }
  bool holds(const at::Tensor& tensor) const override { return tensor.device().is_cpu(); }
};

}  // namespace

std::shared_ptr<StateMemory> make_state_memory(const ShardPlan& plan) {
  switch (plan.offload) {
    case Offload::kNone:
      return nullptr;
    case Offload::kHost:
      return std::make_shared<HostMemory>();
    case Offload::kDirectory:
      return mapped_directory(plan.offload_directory);
  }
  return nullptr;
}

}  // namespace tessera
