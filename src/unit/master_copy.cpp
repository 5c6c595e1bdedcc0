#include "unit/master_copy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

namespace tessera {

void MasterCopy::make(const at::Tensor& part, at::ScalarType dtype,
                      const std::shared_ptr<StateMemory>& offload) {
  is_offloaded_ = offload != nullptr;
  const auto options = part.options().dtype(dtype);
  const at::Tensor values =
      offload ? offload->empty(part.numel(), dtype) : at::empty(part.sizes(), options);
  values_ = values.copy_(part);
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
