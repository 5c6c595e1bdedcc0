#include "model/memory_count.h"

#include <algorithm>
#include <utility>

namespace tessera {

// [Note: Activations are what is left]
//
// Nothing marks tensors as activations. The allocator knows how many bytes tensors have, and the
// model knows which of them are its own; the rest is "activations and other". Gathered parameters
// and gradients move between the two at the events that the model reports; in between, the
// allocator knows its peak, and the model holds the bytes that it held at the event before. So the
// peak of the rest is exact up to the bytes that the model takes at the event itself.
//
// Gradients in flight are released by threads of the process group, at any time. Their bytes are
// read twice, before and after the allocator's, and again if they differ.
namespace {

constexpr int kMostTries = 4;

}  // namespace

MemoryCount::MemoryCount(const ShardedState& state) : state_(state) {
  const at::Device device = state.units().front()->layout().device;
  const auto& offload = state.context().offload;
  keeps_offloaded_ = device.is_cpu() && offload && offload->is_ordinary();
  live_ = live_memory(device);
  last_ = model();
  if (live_) start_ = live_->now() - last_.live;
}

MemoryCount::Held MemoryCount::model() const {
  Held held;
  MemoryBytes& bytes = held.bytes;
  const bool is_offloaded = state_.context().offload != nullptr;
  int64_t shared = 0;  // in memory that no tensor's allocator made
  for (const auto& unit : state_.units()) {
    bytes.parameters += unit->resident_nbytes();
    bytes.gathered += unit->gathered_nbytes();
    if (unit->is_shared()) shared += unit->resident_nbytes() + unit->gathered_nbytes();
    if (unit->master().exists())
      (is_offloaded ? bytes.offloaded : bytes.master_weights) +=
          static_cast<int64_t>(unit->master().values().nbytes());
  }
  for (const auto& gradients : state_.reducer().gradients()) {
    bytes.gradients += gradients->nbytes();
    bytes.gradients_in_flight += gradients->in_flight_nbytes();
  }
  (is_offloaded ? bytes.offloaded : bytes.optimizer_state) +=
      state_.context().watch.optimizer_state();
  held.live = on_device(bytes) - shared;
  return held;
}

int64_t MemoryCount::on_device(const MemoryBytes& bytes) const {
  return bytes.total() - (keeps_offloaded_ ? 0 : bytes.offloaded);
}

MemoryBytes MemoryCount::close() {
  MemoryBytes bytes = last_.bytes;
  if (live_) bytes.other = other(live_->take_peak(), last_.live);
  return bytes;
}

MemoryCount::Now MemoryCount::take() {
  Held held = model();
  int64_t live = live_ ? live_->now() : 0;
  for (int i = 0; live_ && i < kMostTries; ++i) {
    const Held again = model();
    if (again == held) break;
    held = again;
    live = live_->now();
  }
  const Held before = std::exchange(last_, held);
  if (!live_) return {held.bytes, 0};
  const int64_t peak = other(live_->take_peak(), std::max(before.live, held.live));
  held.bytes.other = other(live, held.live);
  return {held.bytes, std::max(peak, held.bytes.other)};
}

}  // namespace tessera
