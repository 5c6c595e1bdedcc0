#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <mutex>
#include <vector>

#include "base/dispatch/unit_key.h"

namespace tessera {

struct Node;

/// How the bytes of a storage are made: an operator, and the recipes of its inputs. Never changes,
/// and holds no storage of a deferred tensor, so there are no cycles.
using Recipe = std::shared_ptr<const Node>;

struct Node {
  /// An argument whose storage has a recipe.
  struct Input {
    size_t argument;
    at::Tensor shape;  ///< the argument without its memory
    size_t nbytes;     ///< of its storage
    Recipe recipe;     ///< null if the operator overwrites all of it unread
  };

  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  ///< all others; tensors among them are copies
  std::vector<Input> inputs;
  bool in_place = false;    ///< the value is the storage of the first argument, not of the result
  at::Generator generator;  ///< in its state before the operator; undefined if it draws nothing
  size_t nbytes = 0;        ///< of the value
  int steps = 1;            ///< operators that an evaluation runs
};

/// Runs the recipe and returns the result. Draws from copies of the recorded generators, so that
/// nothing outside changes.
c10::Storage evaluate(const Recipe& recipe);

/// Returns a storage whose memory is uninitialized.
c10::Storage fresh_storage(size_t nbytes);

/// Return a tensor with the geometry of `shape`, on another storage or on one without memory.
at::Tensor on_storage(const at::Tensor& shape, c10::Storage storage);
at::Tensor without_memory(const at::Tensor& shape);

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
  /// Computes the values and drops the recipe: the memory is the value from now on.
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
