#include "dispatch/settling_storage.h"

#include <utility>

namespace tessera {

at::Tensor make_settling(const at::Tensor& like, c10::intrusive_ptr<SettlingStorage> storage) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   like.key_set().add(kUnitKey), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return at::Tensor(std::move(impl));
}

}  // namespace tessera
