#include "engine/model/unwrap_module.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

namespace tessera {

void ShardedState::give_back(GivenValues which) {
  reducer_->uninstall();
  const auto keep_alive = shared_from_this();
  end_reading();
  for (const auto& unit : units_) unit->give_back(which);
  // The memory may be freed when no peer reads it any more.
  wait_until_unread(stop_reading());
  is_given_back_ = true;
}

void ShardedState::release() noexcept {
  is_released_ = true;
  const bool is_here =
      std::all_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->is_whole(); });
  if (is_given_back_ || !is_here || std::uncaught_exceptions() > 0) return;
  try {
    const auto keep_alive = shared_from_this();
    reducer_->uninstall();
    for (const auto& unit : units_) unit->give_back(GivenValues::kUsed);
    is_given_back_ = true;
  } catch (const std::exception&) {  // a rank has ended before it sent its data
  }
}

void check_unwrap(ShardedState& state) {
  state.check_no_join("unwrap()");
  check_on_all_ranks(state.mesh(), [&] {
    TORCH_CHECK(!state.reducer().is_no_sync(),
                "[unwrap] must be called after the no_sync() guard has ended");
    TORCH_CHECK(!state.residency().is_held(),
                "[unwrap] must be called after the keep_unsharded() guard has ended");
  });
}

void unwrap(ShardedState& state) {
  check_unwrap(state);
  check_on_all_ranks(state.mesh(), [&] {
    TORCH_CHECK(!state.context().watch.has_optimizers(),
                "[unwrap] a ShardedOptimizer steps on parts of the parameters: call its unwrap() "
                "first, or destroy it");
  });
  state.buffers().finish_sync();
  state.residency().free_everything();  // so that all ranks gather the same units
  state.give_back(GivenValues::kUsed);
}

}  // namespace tessera
