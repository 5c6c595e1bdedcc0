#include "base/device/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>

#include <algorithm>

namespace tessera {
namespace {

int count(c10::DeviceType type) {
  if (!at::isAccelerator(type) || !c10::impl::hasDeviceGuardImpl(type)) return 0;
  return c10::impl::getDeviceGuardImpl(type)->deviceCount();
}

}  // namespace

std::optional<c10::DeviceType> accelerator() {
  const auto type = at::getAccelerator();
  return type && count(*type) > 0 ? type : std::nullopt;
}

bool has_device(c10::Device device) {
  return is_host(device) || std::max<int>(device.index(), 0) < count(device.type());
}

c10::Device with_index(c10::Device device) {
  if (is_host(device)) return device.type();  // tensors there have none
  if (device.has_index()) return device;
  return c10::impl::getDeviceGuardImpl(device.type())->getDevice();
}

std::string devices_text() {
  const auto type = accelerator();
  if (!type) return "cpu";
  const int number = count(*type);
  return fmt::format("cpu and {} device{} of type {}", number, number == 1 ? "" : "s",
                     c10::DeviceTypeName(*type, /*lower_case=*/true));
}

c10::DispatchKey backend_key(c10::DeviceType type) {
  return c10::computeDispatchKey(std::nullopt, c10::kStrided, type);
}

at::Generator default_generator_of(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

}  // namespace tessera
