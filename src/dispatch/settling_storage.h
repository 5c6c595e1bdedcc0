#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "dispatch/unit_key.h"

namespace tessera {

/// A storage whose values may have to be waited for, or computed, before an operator reads them.
/// Its tensors carry `kUnitKey`.
class SettlingStorage : public c10::StorageImpl {
 public:
  using c10::StorageImpl::StorageImpl;

  /// Puts the values into the memory.
  virtual void settle() = 0;
};

/// Returns the storage of `tensor` if it is a `T`, which is a kind of `SettlingStorage`; else null.
template <class T = SettlingStorage>
T* settling_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kUnitKey) || !tensor.has_storage()) return nullptr;
  return dynamic_cast<T*>(tensor.storage().unsafeGetStorageImpl());
}

/// Returns a tensor like `like` that begins at the start of `storage` and carries `kUnitKey`.
at::Tensor make_settling(const at::Tensor& like, c10::intrusive_ptr<SettlingStorage> storage);

}  // namespace tessera
