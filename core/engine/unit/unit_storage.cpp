#include "engine/unit/unit_storage.h"

#include <utility>

#include "base/dispatch/storage_memory.h"
#include "tensor/dist_meta.h"

namespace tessera {

UnitStorage::UnitStorage(Unit& unit, std::shared_ptr<void> keep_alive, size_t nbytes,
                         at::Device device)
    : c10::StorageImpl(use_byte_size_t(), c10::SymInt(static_cast<int64_t>(nbytes)),
                       at::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false),
      unit_(&unit),
      keep_alive_(std::move(keep_alive)) {}

void UnitStorage::release_resources() {
  const std::shared_ptr<void> last = std::move(keep_alive_);
  left_.reset();
  c10::StorageImpl::release_resources();
}

void UnitStorage::show(const at::Tensor& full, const std::string& why_not) {
  if (!full.defined()) return take_memory(*this, why_not);
  const at::Device device = _mutable_data_ptr_no_checks().device();
  give_memory(*this, at::DataPtr(full.mutable_data_ptr(), device));
}

void UnitStorage::leave_unit(at::Tensor memory) {
  show(memory, "");
  left_ = std::move(memory);
  unit_ = nullptr;
  const std::shared_ptr<void> last = std::move(keep_alive_);
}

Unit* unit_of(const at::Tensor& maybe_dist) {
  const at::Tensor& tensor = local_of(maybe_dist);
  if (!tensor.defined() || !tensor.key_set().has(kUnitKey) || !tensor.has_storage()) return nullptr;
  auto* storage = dynamic_cast<UnitStorage*>(tensor.storage().unsafeGetStorageImpl());
  return storage ? storage->unit() : nullptr;
}

}  // namespace tessera
