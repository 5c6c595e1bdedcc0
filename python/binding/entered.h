#pragma once

#include <memory>
#include <utility>

namespace tessera::python {

/// An object of C++ that has an effect while it lives, made by `enter` and ended by `exit`: the
/// inside of one of Python's context managers.
template <class Guard>
class Entered {
 public:
  template <class... Args>
  void enter(Args&&... args) {
    guard_ = std::make_unique<Guard>(std::forward<Args>(args)...);
  }
  void exit() { guard_.reset(); }
  /// Between the two.
  Guard* operator->() const { return guard_.get(); }

 private:
  std::unique_ptr<Guard> guard_;
};

}  // namespace tessera::python
