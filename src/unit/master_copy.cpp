#include "unit/master_copy.h"

#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

namespace tessera {

void MasterCopy::make(const at::Tensor& part, const std::shared_ptr<StateMemory>& offload) {
  is_offloaded_ = offload != nullptr;
  if (!is_offloaded_) {
    values_ = part.clone();
    return;
  }
  values_ = offload->empty(part.numel(), part.scalar_type());
  values_.copy_(part);
}

void MasterCopy::widen(const at::Tensor& part, at::ScalarType dtype,
                       const std::shared_ptr<StateMemory>& offload) {
  if (!is_offloaded_) {
    values_ = part.to(dtype, /*non_blocking=*/false, /*copy=*/true);
    return;
  }
  offload->reserve({part.numel() * static_cast<int64_t>(c10::elementSize(dtype))});
  const at::Tensor wide = offload->empty(part.numel(), dtype);
  wide.copy_(part);
  values_ = wide;
}

void MasterCopy::bring_back(at::Device device) {
  TORCH_INTERNAL_ASSERT(is_offloaded_);
  values_ = values_.to(device, values_.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  is_offloaded_ = false;
}

void MasterCopy::take_changed(const at::Tensor& before, const at::Tensor& after) {
  const at::Tensor is_new = after.ne(before).to(values_.device());
  values_.copy_(at::where(is_new, after.to(values_.options()), values_));
}

}  // namespace tessera
