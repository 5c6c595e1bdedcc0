#include "unit/memory_range.h"

namespace tessera {

std::optional<MemoryRange> memory_range(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) return std::nullopt;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  // Other ways to read the pointer compute the values of a deferred tensor, or throw.
  const void* const memory =
      const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks().get();
  const auto start = reinterpret_cast<uintptr_t>(memory);
  const auto item = static_cast<int64_t>(tensor.element_size());
  return MemoryRange{.storage = memory ? nullptr : &storage,
                     .begin = start + static_cast<uint64_t>(tensor.storage_offset() * item),
                     .end = start + static_cast<uint64_t>((last + 1) * item)};
}

}  // namespace tessera
