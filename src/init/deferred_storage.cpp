#include "init/deferred_storage.h"

#include <c10/core/CPUAllocator.h>

#include <utility>

#include "dispatch/storage_memory.h"

namespace tessera {

DeferredStorage::DeferredStorage(Recipe recipe)
    : c10::StorageImpl(use_byte_size_t(), c10::SymInt(static_cast<int64_t>(recipe->nbytes)),
                       at::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)),
                       c10::GetCPUAllocator(), /*resizable=*/true) {
  defer(std::move(recipe));
}

DeferredStorage::DeferredStorage(c10::StorageImpl& storage)
    : c10::StorageImpl(
          use_byte_size_t(), c10::SymInt(static_cast<int64_t>(storage.nbytes())),
          storage.set_data_ptr(at::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU))),
          c10::GetCPUAllocator(), /*resizable=*/true) {}

void DeferredStorage::defer(Recipe recipe) {
  recipe_ = std::move(recipe);
  take_memory(
      *this,
      "[tessera] this tensor was made in a DeferredInit scope and has no memory yet, so it can't "
      "be read by data_ptr(). Call tessera::materialize() on it first, or use it through "
      "operators, which do that");
  has_memory_ = false;
}

void DeferredStorage::make_values() {
  if (!is_deferred()) return;
  const c10::Storage value = evaluate(recipe_);
  give_memory(*this, std::move(value.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  has_memory_ = true;
}

void DeferredStorage::materialize() {
  const std::lock_guard lock(mutex_);
  make_values();
}

void DeferredStorage::settle() {
  const std::lock_guard lock(mutex_);
  make_values();
  recipe_.reset();
}

void DeferredStorage::drop() {
  if (recipe_) defer(std::move(recipe_));
}

void DeferredStorage::release_resources() {
  recipe_.reset();
  c10::StorageImpl::release_resources();
}

at::Tensor make_deferred(const at::Tensor& like, c10::intrusive_ptr<DeferredStorage> storage) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   like.key_set().add(kUnitKey), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return at::Tensor(std::move(impl));
}

void read_into(const at::Tensor& tensor, const at::Tensor& target) {
  const DeferredStorage* storage = deferred_storage(tensor);
  const bool deferred = storage && storage->is_deferred();
  target.copy_(deferred ? on_storage(tensor, evaluate(storage->recipe())) : tensor.detach());
}

}  // namespace tessera
