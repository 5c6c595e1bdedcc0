#include "engine/unit/note_write.h"

#include <c10/core/TensorImpl.h>

namespace tessera {
namespace {

void bump_version(c10::TensorImpl& tensor) {
  if (tensor.version_counter().enabled()) tensor.bump_version();  // inference tensors have none
}

}  // namespace

void note_write(const at::Tensor& tensor) {
  bump_version(*tensor.unsafeGetTensorImpl());
  const at::Tensor& local = local_of(tensor);
  if (!local.is_same(tensor)) bump_version(*local.unsafeGetTensorImpl());
}

void note_write(const ParamSlot& slot) {
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor tensor = slot.tensor(i);
    if (tensor.defined()) note_write(tensor);
  }
}

}  // namespace tessera
