#include "checkpoint/additional_state.h"

#include <fmt/format.h>
#include <tessera/base/generator.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <limits>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "base/device/device.h"

namespace tessera {
namespace {

using torch::optim::LRScheduler;
using Plateau = torch::optim::ReduceLROnPlateauScheduler;

// LibTorch's schedulers can't be saved, and don't expose their counters. A derived class may name a
// protected member of its base, and an explicit instantiation a private one.
struct Counted : LRScheduler {
  static constexpr auto kSteps = &Counted::step_count_;
};

struct PlateauMembers {
  friend constexpr auto revealed(PlateauMembers);
};
template <class Tag, auto... Members>
struct Reveal {
  friend constexpr auto revealed(Tag) { return std::tuple(Members...); }
};
template struct Reveal<PlateauMembers, &Plateau::best, &Plateau::cooldown_counter,
                       &Plateau::num_bad_epochs, &Plateau::last_epoch>;

// Calls `f` with the name of each number and a reference to it.
template <class F>
void visit(const SchedulerPtr& scheduler, F&& f) {
  if (auto* const* counted = std::get_if<LRScheduler*>(&scheduler)) {
    f("step_count", (*counted)->*Counted::kSteps);
    return;
  }
  Plateau& plateau = *std::get<Plateau*>(scheduler);
  const auto [best, cooldown_counter, num_bad_epochs, last_epoch] = revealed(PlateauMembers{});
  f("best", plateau.*best);
  f("cooldown_counter", plateau.*cooldown_counter);
  f("num_bad_epochs", plateau.*num_bad_epochs);
  f("last_epoch", plateau.*last_epoch);
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

std::map<std::string, at::Generator> generators() {
  std::map<std::string, at::Generator> all = {{"cpu", default_generator()}};
  if (const auto type = accelerator())
    all.emplace(c10::DeviceTypeName(*type, /*lower_case=*/true), default_generator_of(*type));
  return all;
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

std::map<std::string, at::Tensor> read_random_state() {
  std::map<std::string, at::Tensor> state;
  for (auto& [name, generator] : generators()) {
    const std::scoped_lock lock(generator.mutex());
    state[name] = generator.get_state();
  }
  return state;
}

void write_random_state(const std::map<std::string, at::Tensor>& state) {
  for (auto& [name, generator] : generators()) {
    const auto it = state.find(name);
    if (it == state.end()) continue;
    const std::scoped_lock lock(generator.mutex());
    generator.set_state(it->second);
  }
}

}  // namespace tessera
