#include "support/sim_device/sim_device.h"

#include "support/sim_device/kernels.h"
#include "support/sim_device/memory.h"
#include "support/sim_device/registration.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {

Use::Use(uint64_t seed, std::chrono::microseconds delay) {
  register_backend();
  set_delays(seed, delay);
  forget_operators_that_waited();
}

Use::~Use() {
  for (int i = 0; i < kDeviceCount; ++i) {
    drain(i);
    forget_fault(i);
    set_limit_of(i, kNoLimit);
    reset_peak_of(i);
  }
  set_delays(0, std::chrono::microseconds(0));
}

int device_count() { return kDeviceCount; }

c10::Device device(int index) {
  register_backend();
  TORCH_CHECK(index >= 0 && index < kDeviceCount, "[sim::device] there are ", kDeviceCount,
              " devices; got index ", index);
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

void synchronize() {
  for (int i = 0; i < kDeviceCount; ++i) drain(i);
  for (int i = 0; i < kDeviceCount; ++i) throw_fault(i);
}

void synchronize(const c10::Device& device) { synchronize_device(device.index()); }

MemoryCount memory(const c10::Device& device) { return memory_count(device.index()); }
void reset_peak(const c10::Device& device) { reset_peak_of(device.index()); }
void set_memory_limit(const c10::Device& device, int64_t bytes) {
  set_limit_of(device.index(), bytes);
}

const void* peek(const void* data) { return alias_of(data); }

Hold::Hold(const c10::Stream& stream) : mark_(std::make_shared<Mark>()) {
  queue_of(stream).wait_for(mark_);
}
Hold::~Hold() { release(); }
void Hold::release() { mark_->reach(); }

}  // namespace tessera::testing::sim
