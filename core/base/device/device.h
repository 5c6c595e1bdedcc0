#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

#include <optional>
#include <string>

namespace tessera {

/// Returns true if the host may read and write memory of `device` itself.
inline bool is_host(c10::Device device) { return device.is_cpu(); }

/// Returns true if the host itself computes on `device`, and nothing is queued: on the CPU, and on
/// the device of meta tensors.
inline bool computes_on_host(c10::Device device) { return device.is_cpu() || device.is_meta(); }

/// Returns true if kernels on `device` follow LibTorch's for accelerators where these differ from
/// the CPU's; devices that register themselves are taken to follow the CPU's.
inline bool has_kernels_of_accelerators(c10::Device device) {
  return !device.is_cpu() && !device.is_privateuseone();
}

/// Returns the type of this process's accelerator: that of which LibTorch has a backend and the
/// machine has a device. None: there is no such type.
std::optional<c10::DeviceType> accelerator();

/// Returns true if this process has `device`: it is the CPU, or a device of a type of which
/// LibTorch has a backend, with an index below their number, or without one (the current device).
bool has_device(c10::Device device);

/// Returns `device` with the index of the current device, if it is an accelerator's without one;
/// the host's without any.
c10::Device with_index(c10::Device device);

/// Returns, for example, "cpu and 2 devices of type cuda", for messages about other devices.
std::string devices_text();

/// Returns the dispatch key of dense tensors on devices of this type.
c10::DispatchKey backend_key(c10::DeviceType type);

/// Returns the default generator of `device`, a device other than the CPU.
at::Generator default_generator_of(c10::Device device);

}  // namespace tessera
