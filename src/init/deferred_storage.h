#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>

#include "dispatch/settling_storage.h"
#include "init/recipe.h"

namespace tessera {

/// The storage of a large tensor made in a `DeferredInit` scope: memory, or a recipe for it.
///
/// Uninitialized tensors (`torch::empty`) have memory, so that code may fill them through raw
/// pointers; no page of it is there before somebody does. Once an operator gives them values, the
/// recipe takes the memory's place.
class DeferredStorage final : public SettlingStorage {
 public:
  /// Without memory.
  explicit DeferredStorage(Recipe recipe);
  /// With the memory of `storage`, which loses it.
  explicit DeferredStorage(c10::StorageImpl& storage);

  bool is_deferred() const { return !has_memory_; }
  const Recipe& recipe() const { return recipe_; }

  /// From now on the value is what `recipe` makes; frees the memory.
  void defer(Recipe recipe);

  /// Makes the values if they are not there. Threads may call it at the same time.
  void materialize();
  /// Makes them for good: the memory is the value from now on.
  void settle() override;
  /// Frees the memory of a storage that was materialized but not settled.
  void drop();

  void release_resources() override;

 private:
  void make_values();

  std::mutex mutex_;
  Recipe recipe_;
  bool has_memory_ = true;
};

/// The storage of `tensor` if it is a deferred one, with or without memory; else null.
inline DeferredStorage* deferred_storage(const at::Tensor& tensor) {
  return settling_storage<DeferredStorage>(tensor);
}

/// Copies the values of `tensor` to `target`. A deferred tensor stays without memory.
void read_into(const at::Tensor& tensor, const at::Tensor& target);

}  // namespace tessera
