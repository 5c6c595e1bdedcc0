#include "checkpoint/schedulers.h"

#include <fmt/format.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <limits>
#include <type_traits>

namespace tessera {
namespace {

using torch::optim::LRScheduler;
using Plateau = torch::optim::ReduceLROnPlateauScheduler;

// LibTorch's schedulers can't be saved, and don't expose their counters. A derived class may name a
// protected member of its base, and an explicit instantiation a private one.
struct Counted : LRScheduler {
  static constexpr auto kSteps = &Counted::step_count_;
};

template <class Tag, auto Member>
struct Reveal {
  friend constexpr auto revealed(Tag) { return Member; }
};
struct Best {
  friend constexpr auto revealed(Best);
};
struct Cooldown {
  friend constexpr auto revealed(Cooldown);
};
struct BadEpochs {
  friend constexpr auto revealed(BadEpochs);
};
struct LastEpoch {
  friend constexpr auto revealed(LastEpoch);
};
template struct Reveal<Best, &Plateau::best>;
template struct Reveal<Cooldown, &Plateau::cooldown_counter>;
template struct Reveal<BadEpochs, &Plateau::num_bad_epochs>;
template struct Reveal<LastEpoch, &Plateau::last_epoch>;

// Calls `f` with the name of each number and a reference to it.
template <class F>
void visit(const SchedulerPtr& scheduler, F&& f) {
  if (auto* const* counted = std::get_if<LRScheduler*>(&scheduler)) {
    f("step_count", (*counted)->*Counted::kSteps);
    return;
  }
  Plateau& plateau = *std::get<Plateau*>(scheduler);
  f("best", plateau.*revealed(Best{}));
  f("cooldown_counter", plateau.*revealed(Cooldown{}));
  f("num_bad_epochs", plateau.*revealed(BadEpochs{}));
  f("last_epoch", plateau.*revealed(LastEpoch{}));
}

template <class T>
bool can_be(double value) {
  if constexpr (std::is_integral_v<T>) {
    return value >= static_cast<double>(std::numeric_limits<T>::min()) &&
           value < static_cast<double>(std::numeric_limits<T>::max());
  } else {
    return true;
  }
}

}  // namespace

std::map<std::string, double> read_scheduler(const SchedulerPtr& scheduler) {
  std::map<std::string, double> state;
  visit(scheduler,
        [&](const char* name, auto& value) { state[name] = static_cast<double>(value); });
  return state;
}

std::string check_scheduler(const SchedulerPtr& scheduler,
                            const std::map<std::string, double>& state) {
  std::string error;
  visit(scheduler, [&](const char* name, auto& value) {
    const auto it = state.find(name);
    if (it == state.end()) {
      error = fmt::format("the checkpoint's has no '{}'", name);
    } else if (!can_be<std::remove_reference_t<decltype(value)>>(it->second)) {
      error = fmt::format("the checkpoint's has {} for '{}'", it->second, name);
    }
  });
  return error;
}

void write_scheduler(const SchedulerPtr& scheduler, const std::map<std::string, double>& state) {
  visit(scheduler, [&](const char* name, auto& value) {
    value = static_cast<std::remove_reference_t<decltype(value)>>(state.at(name));
  });
}

}  // namespace tessera
