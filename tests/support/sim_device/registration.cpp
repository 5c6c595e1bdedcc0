#include "support/sim_device/registration.h"

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include "support/sim_device/copies.h"
#include "support/sim_device/generator.h"
#include "support/sim_device/kernels.h"
#include "support/sim_device/memory.h"
#include "support/sim_device/pinned.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

class SimHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  // Autograd synchronizes the streams of devices that are in use.
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return is_used(device); }

  c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Device getDeviceFromPtr(void* data) const override {
    return device(device_of_address(data));
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(device < 0 ? getCurrentDevice() : device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

void register_backend() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("sim");
    c10::SetAllocator(c10::kPrivateUse1, &device_allocator());
    at::setHostAllocator(c10::kPrivateUse1, &pinned_allocator());
    at::RegisterPrivateUse1HooksInterface(new SimHooks);
    register_kernels();
    at::globalContext().lazyInitDevice(c10::kPrivateUse1);
  });
}

}  // namespace tessera::testing::sim
