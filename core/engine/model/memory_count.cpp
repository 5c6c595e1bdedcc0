#include "engine/model/memory_count.h"

#include <algorithm>
#include <utility>

#include "comm/start/spawned_rank.h"

namespace tessera {

// [Note: Activations are what is left]
//
// Nothing marks tensors as activations. The allocator knows how many bytes tensors have, and the
// model knows which of them are its own; the rest is "activations and other". The allocator knows
// its peak since the last look, so the peak of all bytes is exact. The model's part at that peak is
// taken as what it holds now or held at the last look, whichever is more: in between, it takes over
// gradients without an event.
//
// Gradients in flight are released by threads of the process group, at any time. Their bytes are
// read twice, before and after the allocator's, and again if they differ.
namespace {

constexpr int kMostTries = 4;

}  // namespace

LiveMemory::LiveMemory(at::Device device) : index_(device.index()) {
  if (device.is_cpu()) {
    const bool is_thread = SpawnedRank::current() != nullptr;
    bytes_ = LiveBytes::start(is_thread ? LiveBytes::Scope::kThread : LiveBytes::Scope::kProcess);
  } else {
    allocator_ = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  }
}

int64_t LiveMemory::now() const {
  if (bytes_) return bytes_->now();
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return allocator_->getDeviceStats(index_).allocated_bytes[all].current;
}

// Resetting the peak of a device's allocator is left to the user.
int64_t LiveMemory::take_peak() { return bytes_ ? bytes_->take_peak() : now(); }

MemoryBytes held_by(const ShardedState& state, size_t index) {
  const Unit& unit = *state.units()[index];
  const UnitGradients& gradients = *state.reducer().gradients()[index];
  MemoryBytes bytes{.parameters = unit.resident_nbytes(),
                    .gathered = unit.gathered_nbytes(),
                    .gradients = gradients.nbytes(),
                    .gradients_in_flight = gradients.in_flight_nbytes()};
  if (unit.master().exists())
    (state.context().offload ? bytes.offloaded : bytes.master_weights) =
        static_cast<int64_t>(unit.master().values().nbytes());
  return bytes;
}

MemoryCount::MemoryCount(const ShardedState& state)
    : state_(state), live_(state.units().front()->layout().device) {
  const auto& offload = state.context().offload;
  const bool is_cpu = state.units().front()->layout().device.is_cpu();
  keeps_offloaded_ = is_cpu && offload && offload->is_ordinary();
  last_ = model();
  if (knows_other()) start_ = live_.now() - last_.live;
}

MemoryCount::Held MemoryCount::model() const {
  Held held;
  MemoryBytes& bytes = held.bytes;
  int64_t shared = 0;  // in memory that no tensor's allocator made
  for (size_t i = 0; i < state_.units().size(); ++i) {
    const MemoryBytes unit = held_by(state_, i);
    bytes.parameters += unit.parameters;
    bytes.gathered += unit.gathered;
    bytes.gradients += unit.gradients;
    bytes.gradients_in_flight += unit.gradients_in_flight;
    bytes.master_weights += unit.master_weights;
    bytes.offloaded += unit.offloaded;
    if (state_.units()[i]->is_shared()) shared += unit.parameters + unit.gathered;
  }
  (state_.context().offload ? bytes.offloaded : bytes.optimizer_state) +=
      state_.context().watch.optimizer_state();
  held.live = on_device(bytes) - shared;
  return held;
}

int64_t MemoryCount::on_device(const MemoryBytes& bytes) const {
  return bytes.total() - (keeps_offloaded_ ? 0 : bytes.offloaded);
}

MemoryBytes MemoryCount::close() {
  const Held now = model();
  Held held = now.live > last_.live ? now : last_;
  if (knows_other()) held.bytes.other = other(live_.take_peak(), held.live);
  return held.bytes;
}

MemoryCount::Now MemoryCount::take() {
  Held held = model();
  int64_t live = knows_other() ? live_.now() : 0;
  for (int i = 0; knows_other() && i < kMostTries; ++i) {
    const Held again = model();
    if (again == held) break;
    held = again;
    live = live_.now();
  }
  const Held before = std::exchange(last_, held);
  if (!knows_other()) return {held.bytes, 0, held.bytes.total()};
  const int64_t peak = live_.take_peak();
  const int64_t peak_other = other(peak, std::max(before.live, held.live));
  const int64_t peak_total = held.bytes.total() + other(peak, held.live);
  held.bytes.other = other(live, held.live);
  return {held.bytes, std::max(peak_other, held.bytes.other),
          std::max(peak_total, held.bytes.total())};
}

}  // namespace tessera
