#include "memory/memory_watch.h"

#include <utility>

namespace tessera {

const char* memory_event_name(MemoryEvent event) {
  switch (event) {
    case MemoryEvent::kStart:
      return "start";
    case MemoryEvent::kForwardBegin:
      return "forward begins";
    case MemoryEvent::kUnitUsed:
      return "unit used";
    case MemoryEvent::kGatherStarted:
      return "gather started";
    case MemoryEvent::kUnitGathered:
      return "unit gathered";
    case MemoryEvent::kUnitFreed:
      return "unit freed";
    case MemoryEvent::kBackwardBegin:
      return "backward begins";
    case MemoryEvent::kGradientMade:
      return "gradient made";
    case MemoryEvent::kReductionStarted:
      return "reduction started";
    case MemoryEvent::kUnitReduced:
      return "unit reduced";
    case MemoryEvent::kGradientsCleared:
      return "gradients cleared";
    case MemoryEvent::kBackwardEnd:
      return "backward ends";
    case MemoryEvent::kStepBegin:
      return "step begins";
    case MemoryEvent::kStepEnd:
      return "step ends";
  }
  return "?";
}

void MemoryWatch::remove(const MemoryListener& listener) { std::erase(listeners_, &listener); }

void MemoryWatch::add_optimizer(const void* optimizer, std::function<int64_t()> state_nbytes) {
  optimizers_[optimizer] = std::move(state_nbytes);
}

void MemoryWatch::count_optimizer_state() {
  optimizer_state_ = 0;
  for (const auto& [optimizer, state_nbytes] : optimizers_) optimizer_state_ += state_nbytes();
}

void MemoryWatch::announce() const {
  for (MemoryListener* listener : listeners_) listener->before_change();
}

void MemoryWatch::announce(MemoryEvent event, const std::string& unit) const {
  for (MemoryListener* listener : listeners_) listener->on_memory(event, unit);
}

}  // namespace tessera
