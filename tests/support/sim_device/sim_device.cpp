#include "support/sim_device/sim_device.h"

#include <mutex>
#include <utility>

#include "support/sim_device/backend.h"
#include "support/sim_device/memory.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

struct Entries {
  std::mutex mutex;
  bool is_recording = false;
  std::vector<std::shared_ptr<LoggedOperation>> all;

  static Entries& get() {
    static Entries& entries = *new Entries;
    return entries;
  }
};

}  // namespace

Use::Use(uint64_t seed, std::chrono::microseconds delay) {
  register_backend();
  set_delays(seed, delay);
  forget_operators_that_waited();
}

Use::~Use() {
  for (int i = 0; i < kDeviceCount; ++i) {
    drain(i);
    forget_fault(i);
    set_memory_limit(sim::device(i), kNoLimit);
    reset_peak(sim::device(i));
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

Hold::Hold(const c10::Stream& stream) : mark_(std::make_shared<Mark>()) {
  queue_of(stream).wait_for(mark_);
}
Hold::~Hold() { release(); }
void Hold::release() { mark_->reach(); }

Log::Log() {
  Entries& entries = Entries::get();
  std::lock_guard lock(entries.mutex);
  TORCH_CHECK(!entries.is_recording, "[sim::Log] one log at a time");
  entries.is_recording = true;
}

Log::~Log() {
  Entries& entries = Entries::get();
  std::lock_guard lock(entries.mutex);
  entries.is_recording = false;
  entries.all.clear();
}

std::vector<LoggedOperation> Log::operations() const {
  for (int device = 0; device < kDeviceCount; ++device) drain(device);
  Entries& entries = Entries::get();
  std::lock_guard lock(entries.mutex);
  std::vector<LoggedOperation> all;
  for (const auto& entry : entries.all) all.push_back(*entry);
  return all;
}

std::shared_ptr<LoggedOperation> log_operation(int device, int64_t stream, std::string name) {
  Entries& entries = Entries::get();
  std::lock_guard lock(entries.mutex);
  if (!entries.is_recording) return nullptr;
  LoggedOperation operation{device, stream, std::move(name), std::chrono::steady_clock::now()};
  entries.all.push_back(std::make_shared<LoggedOperation>(std::move(operation)));
  return entries.all.back();
}

void log_run(LoggedOperation& operation, std::chrono::steady_clock::time_point begin) {
  std::lock_guard lock(Entries::get().mutex);
  operation.begin = begin;
  operation.end = std::chrono::steady_clock::now();
}

}  // namespace tessera::testing::sim
