#include "support/sim_device/tensors.h"

#include <utility>

#include "support/sim_device/memory.h"

namespace tessera::testing::sim {

at::Tensor kernel_view(const at::Tensor& tensor) {
  const at::Storage& storage = tensor.storage();
  void* data = const_cast<void*>(storage.data());
  if (tensor.is_privateuseone()) data = alias_of(data);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), {data, c10::kCPU}),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* const impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return view;
}

PlainDispatch::PlainDispatch()
    : keys_(c10::default_included_set,
            c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView) {}

}  // namespace tessera::testing::sim
