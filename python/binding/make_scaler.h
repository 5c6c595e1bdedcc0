#pragma once

#include <tessera/engine/grad_scaler.h>

#include <memory>
#include <utility>

#include "binding.h"

namespace tessera::python {

/// Makes a `GradScaler`, or one of a class derived from it, from Python's arguments.
template <class Scaler>
std::shared_ptr<Scaler> make_scaler(double init_scale, double growth_factor, double backoff_factor,
                                    int64_t growth_interval, bool enabled, int64_t hysteresis,
                                    double min_scale, double max_scale, ProcessGroupPtr group) {
  return std::make_shared<Scaler>(GradScalerOptions{.init_scale = init_scale,
                                                    .growth_factor = growth_factor,
                                                    .backoff_factor = backoff_factor,
                                                    .growth_interval = growth_interval,
                                                    .hysteresis = hysteresis,
                                                    .min_scale = min_scale,
                                                    .max_scale = max_scale,
                                                    .process_group = std::move(group),
                                                    .enabled = enabled});
}

}  // namespace tessera::python
