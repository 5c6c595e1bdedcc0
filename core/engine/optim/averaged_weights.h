#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/model/sharded_state.h"

namespace tessera {

/// The average that an `ExponentialAverage` keeps of this rank's part of each unit.
struct AveragedWeights {
  std::shared_ptr<ShardedState> state;
  double decay = 0;
  int64_t updates = 0;
  bool is_swapped = false;  ///< the units have the averages
  /// Of `Unit::updated()`, by unit: of its size, in float or a wider dtype; undefined where it is
  /// equal to it, as all of the unit's parameters are frozen.
  std::vector<at::Tensor> values = {};
  std::vector<at::Tensor> trained = {};  ///< those units' own, while they have the averages
  std::shared_ptr<const void> exchange = nullptr;  ///< lives while they have

  void update();
  /// Collective.
  void swap();
  /// Throws `c10::ValueError` if there is no average, or if the model has it.
  void check_separate(const char* what) const;
  /// Throws if the model was unwrapped, or has the values of another average.
  void check_usable() const;
  /// Makes memory for the averages, with the units' values where that is new: at the beginning, and
  /// for units that were thawed since. `of_all`: also for units whose parameters are all frozen.
  void prepare(bool of_all = false);
  /// The average of a unit, in its dtype.
  at::Tensor value(const Unit& unit) const;
};

}  // namespace tessera
