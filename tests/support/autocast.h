#pragma once

#include <ATen/autocast_mode.h>

#include <optional>

namespace tessera::testing {

/// Autocast on the CPU for the lifetime of the object, if a dtype is given.
class Autocast {
 public:
  explicit Autocast(std::optional<at::ScalarType> dtype) : on_(dtype.has_value()) {
    if (!on_) return;
    at::autocast::set_autocast_dtype(at::kCPU, *dtype);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~Autocast() {
    if (!on_) return;
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool on_;
};

}  // namespace tessera::testing
