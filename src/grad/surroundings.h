#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace tessera {

/// Generators and their states at the time of `random_state_of()`.
using RandomState = std::vector<std::pair<at::Generator, at::Tensor>>;

RandomState random_state_of(const std::vector<at::Generator>& generators);

/// While it lives, generators are in the given state.
class RandomStateScope {
 public:
  explicit RandomStateScope(const RandomState& state);
  ~RandomStateScope();
  RandomStateScope(const RandomStateScope&) = delete;
  RandomStateScope& operator=(const RandomStateScope&) = delete;

 private:
  RandomState outer_;
};

/// The calling thread's autocast settings.
struct AutocastState {
  struct Device {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<Device> devices;
  bool cache_enabled = true;

  static AutocastState current();
  /// Applies these settings to the calling thread.
  void set() const;
};

/// While it lives, the calling thread has the given settings, but does not cache cast parameters:
/// nothing would drop them before the next optimizer step makes them stale.
class AutocastScope {
 public:
  explicit AutocastScope(AutocastState state);
  ~AutocastScope() { outer_.set(); }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState outer_;
};

/// While it lives, scripts on the calling thread run without optimization. Optimized ones save
/// other tensors for backward, and optimization begins only after some calls.
class PlainScriptScope {
 public:
  PlainScriptScope();
  ~PlainScriptScope();
  PlainScriptScope(const PlainScriptScope&) = delete;
  PlainScriptScope& operator=(const PlainScriptScope&) = delete;

 private:
  bool outer_;
};

}  // namespace tessera
