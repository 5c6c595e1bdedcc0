#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

namespace tessera {

/// A value that holds in a scope of a thread, and on all of autograd's threads during a backward
/// that it runs there. A thread of the device queues the kernels of a device's backward, and does
/// not see the caller's thread-local variables.
///
/// Scopes are `c10::DebugInfoGuard`s: autograd copies those to its threads. Scopes of one kind
/// nest.
template <class T>
class ScopedValue {
 public:
  /// `name` must live as long as the program. `number`: of this kind, for versions of LibTorch in
  /// which kinds are numbers.
  constexpr ScopedValue(const std::string_view* name, uint8_t number)
      : kind_(make_kind<c10::DebugInfoKind>(name, number)) {}

  /// Returns the value of the innermost scope; null outside of scopes.
  const T* find() const {
    const auto* const info = c10::ThreadLocalDebugInfo::get(kind_);
    return info ? &static_cast<const Info*>(info)->value : nullptr;
  }

  /// Begins a scope that lasts as long as the guard.
  c10::DebugInfoGuard scope(T value) const {
    return {kind_, std::make_shared<Info>(std::move(value))};
  }

 private:
  struct Info : c10::DebugInfoBase {
    explicit Info(T value) : value(std::move(value)) {}
    const T value;
  };

  template <class Kind>
  static Kind make_kind(const std::string_view* name, uint8_t number) {
    if constexpr (std::is_enum_v<Kind>) {
      return static_cast<Kind>(number);
    } else {
      return Kind(name);
    }
  }

  const c10::DebugInfoKind kind_;
};

}  // namespace tessera
