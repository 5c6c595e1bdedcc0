#pragma once

#include <ATen/autocast_mode.h>

#include <optional>

#include "support/test_device.h"

namespace tessera::testing {

/// Autocast on the `test_device()` for the lifetime of the object, if a dtype is given.
class Autocast {
 public:
  explicit Autocast(std::optional<at::ScalarType> dtype) : on_(dtype.has_value()) {
    if (!on_) return;
    at::autocast::set_autocast_dtype(test_device().type(), *dtype);
    at::autocast::set_autocast_enabled(test_device().type(), true);
  }
  ~Autocast() {
    if (!on_) return;
    at::autocast::set_autocast_enabled(test_device().type(), false);
    at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool on_;
};

}  // namespace tessera::testing
