#include "unit/updated_storage.h"

#include <utility>

#include "dispatch/storage_memory.h"
#include "unit/unit.h"

namespace tessera {

UpdatedStorage::UpdatedStorage(Unit& unit, at::Tensor tensor)
    : SettlingStorage(use_byte_size_t(), c10::SymInt(static_cast<int64_t>(tensor.nbytes())),
                      at::DataPtr(tensor.mutable_data_ptr(), tensor.device()),
                      /*allocator=*/nullptr, /*resizable=*/false),
      unit_(&unit),
      memory_(std::move(tensor)) {}

void UpdatedStorage::settle() {
  if (unit_) unit_->finish_update();
}

void UpdatedStorage::hide(const std::string& why) { take_memory(*this, why); }

void UpdatedStorage::show() {
  give_memory(*this, at::DataPtr(memory_.mutable_data_ptr(), memory_.device()));
}

void UpdatedStorage::forget_unit() {
  unit_ = nullptr;
  show();
}

void UpdatedStorage::release_resources() {
  memory_.reset();
  c10::StorageImpl::release_resources();
}

}  // namespace tessera
