#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <mutex>

#include "dispatch/unit_key.h"
#include "init/recipe.h"

namespace tessera {

/// The storage of a large tensor made in a `DeferredInit` scope: memory, or a recipe for it.
///
/// Uninitialized tensors (`torch::empty`) have memory, so that code may fill them through raw
/// pointers; its pages are not allocated before they are touched. Once an operator gives them
/// values, the recipe takes the memory's place.
class DeferredStorage final : public c10::StorageImpl {
 public:
  /// Makes a storage without memory.
  explicit DeferredStorage(Recipe recipe);
  /// Takes over the memory of `storage`.
  explicit DeferredStorage(c10::StorageImpl& storage);

  bool is_deferred() const { return !has_memory_; }
  const Recipe& recipe() const { return recipe_; }

  /// Makes `recipe` the source of the value from now on; frees the memory.
  void defer(Recipe recipe);

  /// Computes the values if they are not there. Several threads may call it at the same time.
  void materialize();
  /// Computes the values for good: the memory is the value from now on.
  void settle();
  /// Frees the memory of a storage that was materialized but not settled.
  void drop();

  void release_resources() override;

 private:
  void make_values();

  std::mutex mutex_;
  Recipe recipe_;
  bool has_memory_ = true;
};

/// Returns the storage of `tensor` if it is a deferred one, with or without memory; else null.
inline DeferredStorage* deferred_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kUnitKey) || !tensor.has_storage()) return nullptr;
  return dynamic_cast<DeferredStorage*>(tensor.storage().unsafeGetStorageImpl());
}

/// A tensor like `like`, from the beginning of `storage`, that carries `kUnitKey`.
at::Tensor make_deferred(const at::Tensor& like, c10::intrusive_ptr<DeferredStorage> storage);

/// Copies the values of `tensor` to `target`. A deferred tensor stays without memory.
void read_into(const at::Tensor& tensor, const at::Tensor& target);

}  // namespace tessera
