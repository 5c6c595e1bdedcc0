#include "base/memory/memory_watch.h"

#include <array>
#include <utility>

namespace tessera {

const char* memory_event_name(MemoryEvent event) {
  constexpr std::array kNames = {"start",           "forward begins",    "unit used",
                                 "gather started",  "unit gathered",     "unit freed",
                                 "backward begins", "gradient made",     "reduction started",
                                 "unit reduced",    "gradients cleared", "backward ends",
                                 "step begins",     "step ends"};
  return kNames.at(static_cast<size_t>(event));
}

void MemoryWatch::add_optimizer(const void* optimizer, std::function<int64_t()> state_nbytes) {
  optimizers_[optimizer] = std::move(state_nbytes);
}

void MemoryWatch::count_optimizer_state() {
  optimizer_state_ = 0;
  for (const auto& [optimizer, state_nbytes] : optimizers_) optimizer_state_ += state_nbytes();
}

}  // namespace tessera
