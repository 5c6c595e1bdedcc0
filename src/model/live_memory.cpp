#include "model/live_memory.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <utility>

#include "memory/live_bytes.h"
#include "start/spawned_rank.h"

namespace tessera {
namespace {

class CpuMemory final : public LiveMemory {
 public:
  explicit CpuMemory(std::unique_ptr<LiveBytes> bytes) : bytes_(std::move(bytes)) {}
  int64_t now() override { return bytes_->now(); }
  int64_t take_peak() override { return bytes_->take_peak(); }

 private:
  std::unique_ptr<LiveBytes> bytes_;
};

class DeviceMemory final : public LiveMemory {
 public:
  DeviceMemory(c10::DeviceAllocator& allocator, at::Device device)
      : allocator_(allocator), index_(device.index()) {}
  int64_t now() override {
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return allocator_.getDeviceStats(index_).allocated_bytes[all].current;
  }
  // Resetting the allocator's own peak is left to the user.
  int64_t take_peak() override { return now(); }

 private:
  c10::DeviceAllocator& allocator_;
  c10::DeviceIndex index_;
};

}  // namespace

std::unique_ptr<LiveMemory> live_memory(at::Device device) {
  if (!device.is_cpu()) {
    auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
    return allocator ? std::make_unique<DeviceMemory>(*allocator, device) : nullptr;
  }
  const bool is_thread = SpawnedRank::current() != nullptr;
  auto bytes = LiveBytes::start(is_thread ? LiveBytes::Scope::kThread : LiveBytes::Scope::kProcess);
  return bytes ? std::make_unique<CpuMemory>(std::move(bytes)) : nullptr;
}

}  // namespace tessera
