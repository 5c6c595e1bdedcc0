// The backend's side of c10's guards, streams and events, and of at::accelerator.
#include "support/sim_device/backend.h"

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>
#include <mutex>
#include <vector>

#include "support/sim_device/memory.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

struct SimEvent {
  int device;
  MarkPtr mark;
};

class SimGuardImpl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }

  c10::Device exchangeDevice(c10::Device to) const override {
    return at(sim::exchange_device(to.index()));
  }
  c10::Device getDevice() const override { return at(current_device()); }
  void setDevice(c10::Device to) const override { sim::exchange_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    sim::exchange_device(to.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override { return {}; }

  c10::Stream getStream(c10::Device of) const override { return current_stream(index_of(of)); }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return default_stream(index_of(of));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool /*is_high_priority*/) const override {
    return pool_stream(index_of(of));
  }
  c10::Stream getNewStream(c10::Device of, int /*priority*/) const override {
    return pool_stream(index_of(of));
  }
  c10::Stream exchangeStream(c10::Stream to) const override { return exchange_stream(to); }
  void* getStreamNativeHandle(c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream).synchronize();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device ", int{device},
                " does not match recording stream's device ", int{stream.device_index()}, ".");
    auto*& recorded = reinterpret_cast<SimEvent*&>(*event);
    if (!recorded) recorded = new SimEvent{stream.device_index(), nullptr};
    recorded->mark = queue_of(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) queue_of(stream).wait_for(get(event).mark);
  }
  bool queryEvent(void* event) const override { return !event || get(event).mark->is_reached(); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    get(event).mark->wait();
    throw_fault(get(event).device);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex /*device*/) const override {
    const std::chrono::duration<double, std::milli> elapsed =
        get(to).mark->reached_at() - get(from).mark->reached_at();
    return elapsed.count();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<SimEvent*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

 private:
  static c10::Device at(int device) {
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)};
  }
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  static SimEvent& get(void* event) { return *static_cast<SimEvent*>(event); }
};

// From the start of the program, unlike the rest of the backend (see register_backend()): the first
// backward of a process, which may be another test's, starts autograd's threads for the devices
// that it finds here.
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuardImpl)

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

torch::Library& library(const char* ns, c10::DispatchKey key) {
  static auto& all = *new std::vector<std::unique_ptr<torch::Library>>;
  all.push_back(
      std::make_unique<torch::Library>(torch::Library::IMPL, ns, key, __FILE__, __LINE__));
  return *all.back();
}

void register_backend() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("sim");
    c10::SetAllocator(c10::kPrivateUse1, &device_allocator());
    at::setHostAllocator(c10::kPrivateUse1, &pinned_allocator());
    at::RegisterPrivateUse1HooksInterface(new SimHooks);
    torch::Library& aten = library("aten", c10::DispatchKey::PrivateUse1);
    register_copies(aten);
    register_operators(aten);
    register_autocast();
    at::globalContext().lazyInitDevice(c10::kPrivateUse1);
  });
}

}  // namespace tessera::testing::sim
