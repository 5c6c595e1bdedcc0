#pragma once

#include <string>

#include "dispatch/settling_storage.h"

namespace tessera {

class Unit;

/// The storage of a tensor that deferred updates of a unit read or write, for those who hold the
/// tensor: while one is under way, an operator on it waits for that, and a raw `data_ptr()` throws.
class UpdatedStorage final : public SettlingStorage {
 public:
  /// Shows the memory of `tensor`, which must be dense.
  UpdatedStorage(Unit& unit, at::Tensor tensor);

  void settle() override;
  /// Takes the memory away until `show()`.
  void hide(const std::string& why);
  void show();
  /// The unit is gone: nothing is waited for any more.
  void forget_unit();

  /// The unit holds weak pointers to it.
  void release_resources() override;

 private:
  Unit* unit_;
  at::Tensor memory_;
};

}  // namespace tessera
