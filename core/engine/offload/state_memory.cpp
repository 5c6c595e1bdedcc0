#include "engine/offload/state_memory.h"

#include <ATen/ops/empty.h>

#include "base/device/device.h"

namespace tessera {
namespace {

// Page-locked if there is an accelerator, so that it copies without the host.
class HostMemory : public StateMemory {
 public:
  explicit HostMemory(at::Device of) : device_(of.is_meta() ? of : at::Device(at::kCPU)) {}

  at::Tensor empty(int64_t numel, at::ScalarType dtype) override {
    const bool is_pinned = device_.is_cpu() && accelerator().has_value();
    return at::empty({numel},
                     at::TensorOptions().dtype(dtype).device(device_).pinned_memory(is_pinned));
  }
  void reserve(const std::vector<int64_t>&) override {}
  bool is_ordinary() const override { return !accelerator(); }
  bool holds(const at::Tensor& tensor) const override { return tensor.device() == device_; }

 private:
  const at::Device device_;  // meta for parameters there
};

}  // namespace

std::shared_ptr<StateMemory> make_state_memory(const ShardPlan& plan, at::Device device) {
  switch (plan.offload) {
    case Offload::kNone:
      return nullptr;
    case Offload::kHost:
      return std::make_shared<HostMemory>(device);
    case Offload::kDirectory:
      return mapped_directory(plan.offload_directory);
  }
  return nullptr;
}

}  // namespace tessera
